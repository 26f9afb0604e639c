"""A bundle's ONNX file in the layout of NVIDIA Triton: ``<name>/1/model.onnx``, ``config.pbtxt``.

What the configuration says of inputs and outputs (names, types, sizes) is read from the ONNX file
itself. Triton then answers tensors by tensors: logits of what was prepared as in training. What is
before and after the network, see ``docs/predict.md``, is the client's.

Source: Triton Inference Server, "Model Configuration" and "Model Repository",
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from medfed.common.console import file_names
from medfed.common.errors import ConfigError
from medfed.common.files import replacing_folder, writing
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.bundle.onnx_file import ONNX, import_extra

_TYPES = {"FLOAT": "FP32", "FLOAT16": "FP16", "DOUBLE": "FP64", "UINT8": "UINT8", "INT64": "INT64"}


def write_triton(
    bundle: str | Path, repository: str | Path, name: str | None = None, most: int = 8
) -> Path:
    """Adds a bundle's ONNX file to a model repository of Triton.

    Args:
        bundle: A bundle that was exported with ``onnx=true``.
        repository: Triton's folder of models; it is made where it is missing.
        name: What Triton calls the model; None: after the hospital.
        most: Inputs that Triton may batch together (``max_batch_size``).

    Returns:
        The model's folder in the repository.

    Raises:
        CheckpointError: If the bundle is none, or damaged.
        ConfigError: If it has no ONNX file, the name is taken or cannot be one, or the number is
            below 1.
        DataError: If the folder cannot be written.
    """
    read = read_bundle(Path(bundle))
    if ONNX not in read.hashes:
        raise ConfigError(f"{bundle} holds no {ONNX}; export it with onnx=true.")
    if most < 1:
        raise ConfigError(f"most={most} must be 1 or more.")
    called = str(read.facts["client"] if name is None else name)
    safe = file_names([called])[called]
    if name is not None and safe != name:
        raise ConfigError(f"{name!r} cannot be the name of a folder; choose another one.")
    folder = Path(repository) / safe
    if folder.exists():
        raise ConfigError(f"{folder} is there already; choose another name, or remove it.")
    text = triton_config(read.folder / ONNX, safe, most)
    with writing(folder, "choose another repository"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(folder) as made:
            (made / "1").mkdir()
            shutil.copyfile(read.folder / ONNX, made / "1" / "model.onnx")
            (made / "config.pbtxt").write_text(text, encoding="utf-8")
    return folder


def triton_config(file: Path, name: str, most: int) -> str:
    """Returns ``config.pbtxt`` for an ONNX file.

    Args:
        file: The ONNX file.
        name: Of the model.
        most: ``max_batch_size``, where the first axis of every tensor is free.

    Raises:
        ConfigError: If a tensor has a type that is not known here.
    """
    graph = import_extra("onnx").load(file).graph
    tensors = [*graph.input, *graph.output]
    batched = all(_sizes(t) and _sizes(t)[0] == -1 for t in tensors)
    lines = [
        f"name: {json.dumps(name)}",
        'backend: "onnxruntime"',
        'default_model_filename: "model.onnx"',
        f"max_batch_size: {most if batched else 0}",
    ]
    for kind, group in (("input", graph.input), ("output", graph.output)):
        for tensor in group:
            sizes = _sizes(tensor)[1 if batched else 0 :]
            lines += [
                f"{kind} [",
                "  {",
                f"    name: {json.dumps(tensor.name)}",
                f"    data_type: TYPE_{_type(tensor, file)}",
                f"    dims: [ {', '.join(map(str, sizes))} ]",
                "  }",
                "]",
            ]
    return "\n".join([*lines, "dynamic_batching { }", ""] if batched else [*lines, ""])


def _sizes(tensor: Any) -> list[int]:
    """-1 where any size will do."""
    found = tensor.type.tensor_type.shape.dim
    return [int(d.dim_value) if d.HasField("dim_value") else -1 for d in found]


def _type(tensor: Any, file: Path) -> str:
    onnx = import_extra("onnx")
    called = onnx.TensorProto.DataType.Name(tensor.type.tensor_type.elem_type)
    if called not in _TYPES:
        raise ConfigError(f"{file}: {tensor.name} is of type {called}, which is not known here.")
    return _TYPES[called]
