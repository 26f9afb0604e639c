"""A bundle's ONNX file: the network in single precision, as ONNX Runtime computes it on the CPU.

Quantised weights are in it as the numbers that they stand for. The tracing exporter is used rather
than ``dynamo=True``: batch and spatial sizes stay free in networks whose skips compare sizes
(BasicUNet), names of the weights are kept, and it needs no further package. Spatial sizes must be
multiples of what the network halves, as in PyTorch.
"""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medfed.common.console import levels
from medfed.delivery.bundle.metadata import ANY_SIDE, input_size
from medfed.standalone.errors import CheckpointError, ConfigError, first_line

INPUT, OUTPUT = "image", "logits"
Shape = tuple[int, ...]
_EQUAL = 1e-5  # of the largest logit, if that is above 1


class NotTraceableError(ConfigError):
    """A network that cannot be written as ONNX; its bundle goes without."""


class OnnxNetwork(nn.Module):
    """From images ``(B, C, *spatial)`` or features ``(B, F)`` to logits, on the CPU."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        super().__init__()
        runtime = import_extra("onnxruntime")
        # Tasks ask the first parameter for type and device of what the network takes.
        self.like = nn.Parameter(torch.zeros(()), requires_grad=False)
        try:
            settings = runtime.SessionOptions()
            settings.intra_op_num_threads = threads
            settings.log_severity_level = 4  # what fails is raised
            self._session = runtime.InferenceSession(
                path.read_bytes(), settings, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # whatever ONNX Runtime or the file system raise
            raise CheckpointError(
                f"{path} cannot be loaded by ONNX Runtime ({first_line(error)}); export it anew."
            ) from error

    def forward(self, image: Tensor) -> Tensor:
        """Computes the logits."""
        values = np.ascontiguousarray(image.detach().float().numpy())
        if unlike := _unlike_axes(values.shape[1:], self._session.get_inputs()[0].shape[1:]):
            raise ValueError(f"of the ONNX file {unlike}")
        try:
            (logits,) = self._session.run([OUTPUT], {INPUT: values})
        except Exception as error:  # whatever ONNX Runtime raises on sizes that do not fit
            raise ValueError(first_line(error)) from error
        return torch.from_numpy(logits)


def _unlike_axes(shape: Sequence[int], wanted: Sequence[object]) -> str:
    """Names the axes whose size is another than the wanted one, which may be a word for any.

    Example:
        >>> _unlike_axes((3, 32, 48), (3, "size_2", 32))
        'axis 3 has 48 instead of 32'
    """
    pairs = enumerate(zip(shape, wanted, strict=False), start=1)
    unlike = [(n, a, b) for n, (a, b) in pairs if isinstance(b, int) and b != a]
    return ", ".join(f"axis {n} has {a} instead of {b}" for n, a, b in unlike)


def import_extra(name: str, what: str = "ONNX files need", source: str = "") -> ModuleType:
    """Imports a package that is an extra, such as ``onnx``."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{what} the package {name}: pip install {source or name}.") from error


@torch.no_grad()
def compare(path: Path, network: nn.Module, shape: Shape, any_size: bool) -> None:
    """Asks both for other batches, and other sizes of each axis if they may come.

    A trace may have fixed them.
    """
    try:
        session = OnnxNetwork(path)
        others = [(1, *shape), (3, *shape)]
        if any_size:
            for axis in range(1, len(shape)):
                others.append((1, *shape[:axis], 2 * shape[axis], *shape[axis + 1 :]))
        for size in others:
            image = torch.randn(size, generator=torch.Generator().manual_seed(0))
            expected = network(image.to(next(network.parameters()))).float()
            logits, scale = session(image), max(1.0, float(expected.abs().max()))
            same_shape = logits.shape == expected.shape
            if not same_shape or float((logits - expected).abs().max()) > _EQUAL * scale:
                unlike = f" ({other})" if (other := _unlike_axes(size[1:], shape)) else ""
                raise NotTraceableError(f"ONNX Runtime and PyTorch differ at {size}{unlike}")
    except (CheckpointError, ValueError) as error:
        if isinstance(error, NotTraceableError):
            raise
        raise NotTraceableError(f"ONNX Runtime cannot run it ({first_line(error)})") from error


ONNX = "models/model.onnx"
OPSET = 18
_BATCH = 2  # a batch of 1 would be traced as a constant


def save_onnx(path: Path, network: nn.Module, shape: Shape, any_size: bool = True) -> None:
    """Writes an ONNX file, and compares it with PyTorch where ONNX Runtime is installed."""
    onnx = import_extra("onnx")
    model = onnx.load_from_string(_trace(network, shape))
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    if find_spec("onnxruntime"):
        compare(path, network, shape, any_size)


def save_int8(path: Path, samples: Tensor) -> None:
    """Replaces an ONNX file by one that convolves and multiplies with 8-bit integers.

    Weights have a scale per output channel; activations have one range per layer, which the samples
    give (static quantisation, QDQ format, by ONNX Runtime). All else stays in single precision.
    """
    if samples.ndim > _IMAGES_2D:
        raise ConfigError(
            "onnx=int8 is slower for 3-D images: ONNX Runtime has no 8-bit 3-D convolution for "
            "CPUs; choose onnx=true."
        )
    import_extra("onnxruntime")
    quantization = import_extra("onnxruntime.quantization", source="onnxruntime")
    prepare = import_extra("onnxruntime.quantization.shape_inference", source="onnxruntime")

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        inputs = iter([{INPUT: sample[None].float().numpy()} for sample in samples])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.inputs, None)

    # ONNX Runtime says much of axes of layers that it leaves as they are.
    with levels({"": logging.CRITICAL + 1}), tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / path.name
        prepare.quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            *(str(prepared), str(path), Samples()),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            reduce_range=True,  # 7 bits of weights: sums of 8 overflow on CPUs without VNNI
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
        )


_IMAGES_2D = 4  # axes of a batch


def trace_shape(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape ``(C, *spatial)`` that a bundle's network is traced with.

    Example:
        >>> trace_shape({"channels": ["a", "b", "c"], "spatial_dims": None, "input": {}})
        (3,)
        >>> trace_shape({"channels": ["CT"], "spatial_dims": 2, "patch_size": None,
        ...              "input": {"adjacent_slices": 3}})
        (3, 64, 64)
    """
    channels = len(facts["channels"]) * int(facts["input"].get("adjacent_slices") or 1)
    dims = facts["spatial_dims"]
    if not dims:
        return (channels,)
    size = input_size(facts)
    return (channels, *(size if size and len(size) == dims else [ANY_SIDE] * dims))


def _trace(network: nn.Module, shape: tuple[int, ...]) -> bytes:
    """The network in single precision; its weights keep their names, and nothing is folded."""
    axes = {0: "batch", **{i + 1: f"size_{i}" for i in range(1, len(shape))}}
    image = torch.zeros(_BATCH, *shape).to(next(network.parameters()))
    memory = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # Of the exporter itself, and of sizes that MONAI compares while it is traced.
            warnings.simplefilter("ignore")
            # Logits of a segmentation have the input's sizes; others have none.
            rank = network(image).ndim
            dynamic = {i: n for i, n in axes.items() if i < rank and (i == 0 or rank > 2)}
            torch.onnx.export(
                network,
                (image,),
                memory,  # type: ignore[arg-type]  # this exporter takes files, too
                dynamo=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_axes={INPUT: axes, OUTPUT: dynamic},
                # In evaluation mode the exporter would merge normalisation into the weights.
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
            )
    except Exception as error:  # whatever exporters raise
        raise NotTraceableError(f"its network cannot be traced ({first_line(error)})") from error
    return memory.getvalue()
