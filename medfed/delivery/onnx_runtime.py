"""An ONNX file in the place of the network, computed by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from medfed.delivery.bundle import ONNX, Bundle
from medfed.delivery.onnx_export import INPUT, OUTPUT
from medfed.errors import CheckpointError, ConfigError


class OnnxNetwork(nn.Module):
    """From images ``(B, C, *spatial)`` or features ``(B, F)`` to logits, on the CPU.

    Args:
        path: An ONNX file of :func:`medfed.delivery.onnx_export.save_onnx`.
        threads: Threads of ONNX Runtime.

    Raises:
        ConfigError: If the package ``onnxruntime`` is not installed.
        CheckpointError: If the file cannot be loaded.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        super().__init__()
        runtime = import_onnxruntime()
        # Tasks ask the first parameter for type and device of what the network takes.
        self.like = nn.Parameter(torch.zeros(()), requires_grad=False)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors; loading tells of every folded node otherwise
        try:
            self._session = runtime.InferenceSession(
                path.read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # whatever ONNX Runtime or the file system raise
            cause = str(error).partition("\n")[0].rstrip(".")
            raise CheckpointError(
                f"{path} cannot be loaded by ONNX Runtime ({cause}); export the bundle anew."
            ) from error

    def forward(self, image: Tensor) -> Tensor:
        """Computes the logits.

        Raises:
            ValueError: If ONNX Runtime cannot compute with such an input.
        """
        values = np.ascontiguousarray(image.detach().float().numpy())
        try:
            (logits,) = self._session.run([OUTPUT], {INPUT: values})
        except Exception as error:  # whatever ONNX Runtime raises on sizes that do not fit
            raise ValueError(str(error).partition("\n")[0]) from error
        return torch.from_numpy(logits)


def load_onnx(bundle: Bundle, device: str | None = None) -> OnnxNetwork:
    """Loads the ONNX file of a bundle, with as many threads as PyTorch has.

    Args:
        bundle: Checked by `read_bundle`, hashes included.
        device: Must be None or ``"cpu"``.

    Raises:
        ConfigError: If the bundle holds none, ``onnxruntime`` is not installed, or the device is
            another.
        CheckpointError: If the file cannot be loaded.
    """
    if device not in (None, "cpu"):
        raise ConfigError(f"runtime=onnx runs on the CPU, not on device={device}; leave one out.")
    if ONNX not in bundle.facts["hashes"]:
        raise ConfigError(
            f"{bundle.folder} holds no {ONNX}; export it with onnx=true, or choose runtime=torch."
        )
    return OnnxNetwork(bundle.folder / ONNX, torch.get_num_threads())


def import_onnxruntime() -> ModuleType:
    """Imports ``onnxruntime``, which is an extra.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError("ONNX files need a package more: pip install 'medfed[onnx]'.") from error
    module: ModuleType = onnxruntime
    return module
