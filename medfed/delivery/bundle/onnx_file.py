"""A bundle's ONNX file: quantised weights stay packed on disk, ONNX Runtime computes with it.

The network is traced with its ordinary weights. Then every quantised weight is replaced by its bit
planes, its centres and the few nodes that decode them::

    planes (bits, ceil(n / 8), 1) --BitwiseAnd [1, 2, .., 128]--Cast to bool--+
    weights [1, 2, 4, ..] of the bits ----------------------------------------Where, else 0
    --ReduceSum over the bits--+
    centres (m,) --------------Gather--(to n elements, if 8 is no divisor)--Reshape--> the weight

None of them depends on the input, so ONNX Runtime folds them into plain weights once, when it loads
the file, and then fuses and runs the network as it does one in single precision. Nodes are put in
after the trace because exporters fold small constants themselves, which would store those weights
as floats again. Bytes are compared under masks: ONNX Runtime has no shifts of bytes on every
device.

The tracing exporter is used rather than ``dynamo=True``: batch and spatial sizes stay free in
networks whose skips compare sizes (BasicUNet), names of the weights are kept, and it needs no
further package. Spatial sizes must be multiples of what the network halves, as in PyTorch.

ONNX files that are run: by ONNX Runtime on the CPU, and compared with PyTorch.
"""

from __future__ import annotations

import io
import math
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medfed.common.errors import CheckpointError, ConfigError, first_line
from medfed.delivery.bundle.metadata import input_size
from medfed.delivery.bundle.weights import Codebook
from medfed.federation.split import aliases

INPUT, OUTPUT = "image", "logits"
_EQUAL = 1e-5  # of the largest logit, if that is above 1


class NotTraceableError(ConfigError):
    """A network that cannot be written as ONNX; its bundle goes without."""


class OnnxNetwork(nn.Module):
    """From images ``(B, C, *spatial)`` or features ``(B, F)`` to logits, on the CPU.

    Args:
        path: An ONNX file of :func:`save_onnx`.
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
        runtime = import_extra("onnxruntime")
        # Tasks ask the first parameter for type and device of what the network takes.
        self.like = nn.Parameter(torch.zeros(()), requires_grad=False)
        try:
            content = path.read_bytes()
            content = _folded(runtime, content) if fold else content
            self._session = _session(runtime, content, threads)
        except Exception as error:  # whatever ONNX Runtime or the file system raise
            raise CheckpointError(
                f"{path} cannot be loaded by ONNX Runtime ({first_line(error)}); export the "
                "bundle anew."
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
            raise ValueError(first_line(error)) from error
        return torch.from_numpy(logits)


def import_extra(name: str) -> ModuleType:
    """Imports ``onnx`` or ``onnxruntime``, which are an extra.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"ONNX files need the package {name}: pip install {name}.") from error


@torch.no_grad()
def compare(path: Path, network: nn.Module, shape: tuple[int, ...], any_size: bool) -> None:
    """Asks both for other batches, and sizes if they may come: a trace may have fixed them.

    Args:
        path: The ONNX file.
        network: The network that it was made of.
        shape: ``(C, *spatial)`` or ``(F,)`` of one input that it was traced with.
        any_size: Whether images of other sizes will be given to it.

    Raises:
        NotTraceableError: If they differ by more than 1e-5 of the largest logit (or of 1).
    """
    try:
        session = OnnxNetwork(path)
        others = [(1, *shape), (3, *shape)]
        if any_size and len(shape) > 1:
            others.append((1, shape[0], 2 * shape[1], *shape[2:]))
        for size in others:
            image = torch.randn(size, generator=torch.Generator().manual_seed(0))
            expected = network(image.to(next(network.parameters()))).float()
            found, scale = session(image), max(1.0, float(expected.abs().max()))
            if (
                found.shape != expected.shape
                or float((found - expected).abs().max()) > _EQUAL * scale
            ):
                raise NotTraceableError(f"ONNX Runtime and PyTorch differ at inputs of {size}")
    except (CheckpointError, ValueError) as error:
        if isinstance(error, NotTraceableError):
            raise
        raise NotTraceableError(f"ONNX Runtime cannot run it ({first_line(error)})") from error


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


ONNX = "models/model.onnx"
OPSET = 18  # the first with BitwiseAnd
_BATCH = 2  # a batch of 1 would be traced as a constant


def save_onnx(
    path: Path,
    network: nn.Module,
    books: Mapping[str, Codebook],
    shape: tuple[int, ...],
    any_size: bool = True,
) -> None:
    """Writes an ONNX file, and compares it with PyTorch where ONNX Runtime is installed.

    Args:
        path: Where to.
        network: In evaluation mode; its weights are those of the codebooks where there are some.
        books: Quantised weights by name; empty for a file in single precision.
        shape: ``(C, *spatial)`` or ``(F,)`` of one input to trace with. Batch and spatial sizes are
            free in the file.
        any_size: Whether images of other sizes will be given to it.

    Raises:
        ConfigError: If the package ``onnx`` is not installed.
        NotTraceableError: If the network cannot be traced, or what was traced answers something
            else.
    """
    onnx = import_extra("onnx")
    model = onnx.load_from_string(_trace(network, shape))
    entries = {n: entry for n, entry in aliases(network).items() if entry in books}
    _shorten(model.graph, entries)
    known = {t.name for t in model.graph.initializer}
    known |= {name for node in model.graph.node for name in node.output}
    for name, entry in entries.items():  # what the output does not need is not in the graph
        if name in known:
            pack_initializer(model.graph, name, books[entry])
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    if find_spec("onnxruntime"):
        compare(path, network, shape, any_size)


def pack_initializer(graph: Any, name: str, book: Codebook) -> None:
    """Replaces a weight of an ONNX graph by planes, centres and the nodes that decode them.

    Args:
        graph: ``onnx.GraphProto``, changed in place.
        name: Of an initializer, the parameter's name.
        book: What it holds.

    Raises:
        NotTraceableError: If the graph has no such weight, or of another shape.
    """
    stored = [i for i, t in enumerate(graph.initializer) if t.name == name]
    # The exporter stores equal tensors once, and copies them where the others belong.
    copies = [i for i, n in enumerate(graph.node) if n.op_type == "Identity" and name in n.output]
    if stored and tuple(graph.initializer[stored[0]].dims) == book.shape:
        del graph.initializer[stored[0]]
    elif copies:
        del graph.node[copies[0]]
    else:
        raise NotTraceableError(f"the traced network has no weight {name} of shape {book.shape}")
    for index, node in enumerate(_decoder(graph, name, book)):
        graph.node.insert(index, node)


def trace_shape(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape ``(C, *spatial)`` that a bundle's network is traced with.

    Args:
        facts: The part ``medfed`` of the metadata.

    Returns:
        The window or patch, or 64 along each axis where whole slices or volumes of any size go in.

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
    return (channels, *(size if size and len(size) == dims else [64] * dims))


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
            kept = {i: n for i, n in axes.items() if i < rank and (i == 0 or rank > 2)}
            torch.onnx.export(
                network,
                (image,),
                memory,  # type: ignore[arg-type]  # this exporter takes files, too
                dynamo=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_axes={INPUT: axes, OUTPUT: kept},
                # In evaluation mode the exporter would merge normalisation into the weights.
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
            )
    except Exception as error:  # whatever exporters raise
        raise NotTraceableError(
            f"the network cannot be traced for ONNX ({first_line(error)})"
        ) from error
    return memory.getvalue()


def _decoder(graph: Any, name: str, book: Codebook) -> list[Any]:
    """The nodes that compute the weight ``name``, first to last; adds the tensors they need."""
    onnx = import_extra("onnx")
    number = len(graph.initializer)  # grows with every weight, so that names differ, and are short
    planes, centers = f"planes{number}", f"centers{number}"
    count, values = f"count{math.prod(book.shape)}", f"values{book.bits}"
    shape = "shape" + "x".join(map(str, book.shape))
    tensors = {
        "masks": (2 ** torch.arange(8)).to(torch.uint8),
        "zero": torch.zeros((), dtype=torch.int64),
        "first": torch.zeros(1, dtype=torch.int64),
        values: 2 ** torch.arange(book.bits).reshape(-1, 1, 1),
        shape: torch.tensor(book.shape, dtype=torch.int64),
        planes: book.planes()[:, :, None],
        centers: book.centers.float(),
    }
    odd = math.prod(book.shape) % 8 != 0
    if odd:
        tensors |= {"flat": torch.tensor([-1]), count: torch.tensor([math.prod(book.shape)])}
    known = {t.name for t in graph.initializer}
    graph.initializer.extend(
        onnx.numpy_helper.from_array(t.numpy(), n) for n, t in tensors.items() if n not in known
    )
    node, own = onnx.helper.make_node, [f"w{number}.{i}" for i in range(7)]
    trim = [
        node("Reshape", [own[4], "flat"], [own[5]]),
        node("Slice", [own[5], "first", count], [own[6]]),
    ]
    return [
        node("BitwiseAnd", [planes, "masks"], [own[0]]),
        node("Cast", [own[0]], [own[1]], to=onnx.TensorProto.BOOL),
        node("Where", [own[1], values, "zero"], [own[2]]),
        node("ReduceSum", [own[2], "first"], [own[3]], keepdims=0),
        node("Gather", [centers, own[3]], [own[4]]),
        *(trim if odd else []),
        node("Reshape", [own[6 if odd else 4], shape], [name]),
    ]


def _shorten(graph: Any, weights: Iterable[str]) -> None:
    """Leaves out sources and long names of the nodes; weights, input and output keep theirs."""
    kept = {INPUT, OUTPUT, *weights, *(t.name for t in graph.initializer)}
    produced = [n for node in graph.node for n in node.output if n and n not in kept]
    short = {name: f"v{i}" for i, name in enumerate(produced)}
    for node in graph.node:
        node.ClearField("name")
        node.ClearField("doc_string")
        del node.metadata_props[:]
        for names in (node.input, node.output):
            names[:] = [short.get(n, n) for n in names]
    del graph.value_info[:]
