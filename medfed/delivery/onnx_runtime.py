"""An ONNX file in the place of the network, computed by ONNX Runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

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
        fold: Whether the packed weights are decoded in a pass of their own. What ONNX Runtime then
            loads is a plain network, which it lays out as it does one in single precision; decoded
            in the same pass, networks of many small layers run some percent slower.

    Raises:
        ConfigError: If the package ``onnxruntime`` is not installed.
        CheckpointError: If the file cannot be loaded.
    """

    def __init__(self, path: Path, threads: int = 1, fold: bool = True) -> None:
        super().__init__()
        runtime = import_onnxruntime()
        # Tasks ask the first parameter for type and device of what the network takes.
        self.like = nn.Parameter(torch.zeros(()), requires_grad=False)
        try:
            content = path.read_bytes()
            self._session = _session(
                runtime, _folded(runtime, content) if fold else content, threads
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


def _session(runtime: ModuleType, content: bytes, threads: int, folded: Path | None = None) -> Any:
    """Loads a model; with ``folded`` no further than constants, which it then writes there."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors; loading tells of every folded node otherwise
    if folded is not None:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded)
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _folded(runtime: ModuleType, content: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "folded.onnx"
        _session(runtime, content, 1, path)
        return path.read_bytes()


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
