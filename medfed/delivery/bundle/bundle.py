"""A bundle's folder: checked before anything of it is used, written whole or not at all.

It holds::

    configs/metadata.json    what the model is, and what it expects of its input
    configs/manifest.json    the hashes of all other files
    configs/inference.json   how MONAI runs it (``python -m monai.bundle run``)
    models/model.pt          its weights, a plain state dict of the network
    models/packed.pt         the same, smaller, where they are quantised; then ``model.pt`` may be
                             left out, see :mod:`medfed.delivery.bundle.weights`
    models/model.onnx        the same for ONNX Runtime, if it was asked for
    scripts/                 what reads, infers and writes without this package: all modules of
                             :mod:`medfed.standalone`
    docs/README.md           how it is run
    docs/model_card.md       what is recorded of data, metrics and origin

Every line of the pages comes from the metadata; where nothing was recorded, the page says so.
MONAI evaluates the expressions of ``inference.json``. The reader here executes nothing: it builds
the network from the plain data of ``metadata.json``, and only what
:func:`medfed.delivery.bundle.networks.build_network` allows.
"""

from __future__ import annotations

import json
import logging
import os
import re
import reprlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medfed import standalone
from medfed.common.console import in_markdown, short
from medfed.common.schemas import parse_json
from medfed.common.untrusted import reading
from medfed.delivery.bundle import metadata, onnx_file, weights
from medfed.delivery.bundle.networks import bounded, build_network, check_state, is_known, is_own
from medfed.delivery.bundle.weights import Codebook
from medfed.records.bundles import MODEL, PACKED, Manifest
from medfed.records.places import MANIFEST, METADATA, refusal
from medfed.standalone import files
from medfed.standalone.columns import Columns
from medfed.standalone.decode import fill
from medfed.standalone.errors import CheckpointError, DataError
from medfed.standalone.masks import map_codes
from medfed.standalone.neighbours import with_store_of
from medfed.standalone.outputs import only_logits

FOLDERS = ("configs", "models", "scripts", "docs")
_BUNDLE_FILE = re.compile(
    r"configs/(metadata|inference|manifest)\.json|models/(model\.(pt|onnx)|packed\.pt)|scripts/\w+\.py"
    r"|docs/(README|model_card)\.md"
)
# What MONAI's own runs, Python and file managers leave in a folder.
_LEFT_BY_OTHERS = ("__pycache__", ".DS_Store", "Thumbs.db", "desktop.ini")
_OUTPUTS = ("eval", "input")
_TEMPLATES = Path(__file__).parent / "templates"
README, CARD = "docs/README.md", "docs/model_card.md"
COPY_AGAIN = "copy the bundle again"


def write_manifest(folder: Path) -> dict[str, str]:
    """Writes down the hashes of all files that a bundle consists of."""
    (folder / MANIFEST).unlink(missing_ok=True)
    hashes = {name: files.sha256(folder / name) for name in sorted(_files(folder))}
    files.write_json(folder / MANIFEST, {"sha256": hashes})
    return hashes


def _check_files(folder: Path, hashes: Mapping[str, str], whole: bool) -> None:
    """Compares a bundle's files with their hashes.

    Only names that the folder itself lists are opened, so none leads out of it.
    """
    present = set(_files(folder)) - {MANIFEST}
    # The packed weights are whole by themselves; MONAI's tools alone need the others.
    missing = sorted(hashes.keys() - present - ({MODEL} if PACKED in hashes else set()))
    if missing and whole:
        raise CheckpointError(f"{folder / missing[0]} is missing; copy the bundle again.")
    if added := sorted(present - hashes.keys()):
        raise CheckpointError(f"{folder / added[0]} is no part of the bundle; move it elsewhere.")
    # A hash reveals a torn copy or a change, but nobody who changes the manifest as well.
    for name in sorted(present):
        if files.sha256(folder / name) != hashes[name]:
            raise CheckpointError(
                f"{folder / name} is not the file that was exported (its hash differs from "
                f"{MANIFEST}); copy the bundle again."
            )


def foreign(folder: Path) -> list[str]:
    """Lists what lies in a bundle's folder that exporting it anew would lose, such as masks."""
    return sorted(name for name, _ in _walk(folder, ()) if not _BUNDLE_FILE.fullmatch(name))


def _files(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, but for outputs and what programs leave behind."""
    for name, path in _walk(folder, _OUTPUTS):
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} is a link or no plain file; put the file itself there.")
        yield name


def _walk(folder: Path, outputs: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Name and path of everything that is no folder; links are not followed."""
    for place, inside, names in os.walk(folder):
        skipped = (*_LEFT_BY_OTHERS, *(outputs if Path(place) == folder else ()))
        links = [name for name in inside if (Path(place) / name).is_symlink()]
        for name in (*links, *names):
            if name not in skipped:
                path = Path(place) / name
                yield path.relative_to(folder).as_posix(), path
        inside[:] = [name for name in inside if name not in skipped]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bundle:
    """A bundle whose hashes and versions agree."""

    folder: Path  # where it lies
    metadata: dict[str, Any]  # all of ``configs/metadata.json``
    state: dict[str, Tensor]  # weights and buffers by name, dense; tied ones under their first name
    hashes: Mapping[str, str]  # SHA-256 of its files by name

    @property
    def facts(self) -> dict[str, Any]:
        """The part of the metadata under ``medfed``."""
        facts: dict[str, Any] = self.metadata["medfed"]
        return facts

    def network(self) -> nn.Module:
        """Builds the network with its weights, in evaluation mode."""
        plain = self.facts["network"]
        _check_packages(self.folder, self.facts.get("packages") or {})
        numbers = sum(t.numel() for t in self.state.values())
        try:
            if "count" in plain and plain["count"] not in range(1, len(self.state) + 1):
                raise RuntimeError(f"{reprlib.repr(plain['count'])} parts")
            # Of a network whose code is known, shapes are compared before any memory is taken; code
            # from elsewhere may compute with tensors as it is built, so `bounded` stops it instead.
            if is_known(plain):  # the device "meta" takes no memory, whatever sizes it names
                with torch.device("meta"), bounded(len(self.state), numbers):
                    check_state(with_store_of(build_network(plain), self.state), self.state)
            with bounded(len(self.state), numbers):
                network = with_store_of(build_network(plain), self.state)
            check_state(network, self.state)
            network = only_logits(fill(network, self.state))
        except RuntimeError as error:
            first = str(error).splitlines()[-1].strip()
            raise CheckpointError(
                f"The weights of {self.folder} do not fit its network ({first}); export it anew."
            ) from error
        return network.to(next(t.dtype for t in self.state.values() if t.is_floating_point()))


def read_bundle(folder: Path, whole: bool = True) -> Bundle:
    """Reads a bundle; not `whole`: of which only the files of a prediction are there."""
    files.restore_folder(folder)
    content = _read_metadata(folder)
    with reading(folder / MANIFEST, COPY_AGAIN):
        hashes = parse_json(folder / MANIFEST, Manifest)["sha256"]
    file = PACKED if PACKED in hashes else MODEL
    for name in (file, METADATA):
        if name not in hashes:
            raise CheckpointError(f"{folder / MANIFEST} has no hash of {name}; export it anew.")
    _check_files(folder, hashes, whole)
    metadata.check_facts(content["medfed"], folder / METADATA)
    return Bundle(folder, content, weights.load_weights(folder / file), hashes)


def write_bundle(
    folder: Path,
    facts: Mapping[str, Any],
    dense: Mapping[str, Tensor],
    books: Mapping[str, Codebook],
    onnx: bool = False,
    samples: Tensor | None = None,
) -> dict[str, Any]:
    """Writes a bundle in the place of one that is there already."""
    _check_place(folder)
    state = weights.with_codebooks(dense, books)
    with files.writing(folder, "choose another out=FOLDER"), files.replacing_folder(folder) as made:
        for name in FOLDERS:
            (made / name).mkdir()
        network = Bundle(folder, {"medfed": facts}, state, {}).network()
        weights.save(made / MODEL, network.state_dict())
        if books:
            weights.save_packed(made / PACKED, dense, books)
        named = {"fp32": MODEL, "packed": PACKED if books else MODEL}
        if onnx and _saved_as_onnx(made / onnx_file.ONNX, network, facts):
            if samples is not None:
                onnx_file.save_int8(made / onnx_file.ONNX, samples)
            named["onnx"] = onnx_file.ONNX
        sizes = {what: (made / file).stat().st_size for what, file in named.items()}
        whole = {**facts, "bits": {n: b.bits for n, b in books.items()}, "sizes": sizes}
        files.write_json(made / "configs" / "inference.json", _inference_config(whole))
        for script in sorted(Path(standalone.__path__[0]).glob("*.py")):
            shutil.copyfile(script, made / "scripts" / script.name)
        for name in (README, CARD):
            (made / name).write_text(page(name, whole), encoding="utf-8")
        files.write_json(made / METADATA, metadata.monai_metadata(whole))
        write_manifest(made)
    return whole


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(refusal(folder, METADATA))
    with reading(path, COPY_AGAIN):
        content: dict[str, Any] = parse_json(path)
    facts = content.get("medfed") if isinstance(content, dict) else None
    if not isinstance(facts, dict):
        raise CheckpointError(f"{folder} is no bundle of medfed export, and no other is read.")
    number, known = facts.get("format_version"), metadata.FORMAT_VERSION
    if number != known:
        raise CheckpointError(
            f"{folder} has version {reprlib.repr(number)}, but this program reads version "
            f"{known}; export the bundle anew, or update the program."
        )
    return content


def _check_place(folder: Path) -> None:
    """Refuses to replace what is no bundle, or a bundle with something of the user's in it."""
    if folder.is_dir() and (folder / MANIFEST).is_file():
        if lost := foreign(folder):
            raise DataError(f"{folder / lost[0]} would be lost by the export; move it elsewhere.")
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"{folder} holds something else than a bundle; choose another out=FOLDER.")


def _saved_as_onnx(path: Path, network: nn.Module, facts: Mapping[str, Any]) -> bool:
    """Writes the ONNX file; where that cannot be, a line says so and the bundle goes without."""
    try:
        any_size = metadata.input_size(facts) is None
        onnx_file.save_onnx(path, network, onnx_file.trace_shape(facts), any_size)
    except onnx_file.NotTraceableError as error:
        path.unlink(missing_ok=True)
        client, why = short(str(facts["client"])), str(error).rstrip(".")
        _log.warning("No ONNX file of %s: %s; models/model.pt has the weights.", client, why)
        return False
    return True


def _check_packages(folder: Path, packages: Mapping[str, str]) -> None:
    """Refuses a network whose packages are missing; warns of other versions than at training."""
    for name, known in packages.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise CheckpointError(
                f"The network of {folder} needs {name} {known}: pip install {name}=={known}."
            ) from None
        if installed.split(".")[:2] != known.split(".")[:2]:
            _log.warning("%s was made with %s %s; here is %s.", folder, name, known, installed)


def page(name: str, facts: Mapping[str, Any]) -> str:
    """Writes a page for people."""
    environment = files.text_templates(_TEMPLATES)
    environment.filters |= {"bytes": "{:,}".format, "interval": _interval}
    environment.filters |= {"number": _number, "numbers": _numbers}
    facts = in_markdown(facts)
    source = facts["input"]
    table = source["kind"] == "table"
    inputs = Columns.from_facts(source).inputs() if table else [(n, n) for n in facts["channels"]]
    columns = dict(zip(facts["channels"], (column for _, column in inputs), strict=True))
    return environment.get_template(name.removeprefix("docs/")).render(
        facts=facts,
        source=source,
        sizes=facts["sizes"],
        card=facts.get("card") or {},
        own=is_own(facts["network"]),
        files=source.get("files"),
        bits=sorted(set(facts["bits"].values())),
        absent=list(dict.fromkeys(c for n, c in columns.items() if n not in facts["present"])),
        inputs="Features" if table else "Channels",
        outputs=outputs(facts),
        packages=["monai", "nibabel", "pillow", "fire", *sorted(metadata.further(facts))],
        ranges=list(_ranges(source)),
        versions={n: v for n, v in facts["versions"].items() if isinstance(v, str)},
    )


def outputs(facts: Mapping[str, Any]) -> str:
    """What the results hold: names, of a label map with their values."""
    if facts.get("activation") != "softmax":
        return ", ".join(facts["labels"])
    codes = map_codes(facts) or {}
    return "a label map: 0 background, " + ", ".join(f"{v} {name}" for name, v in codes.items())


def _ranges(source: Mapping[str, Any]) -> Iterator[str]:
    """The values of a table's columns that training has seen."""
    numeric = [n for n in source.get("features", ()) if n not in (source.get("categories") or {})]
    ends = zip(numeric, source.get("lowest") or (), source.get("highest") or (), strict=False)
    yield from (f"{n} {low:g} to {high:g}" for n, low, high in ends if low is not None)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _numbers(lengths: Sequence[float], between: str = " × ") -> str:
    return between.join(f"{mm:.3g}" for mm in lengths)


def _interval(ends: Sequence[float | None] | None) -> str:
    if not ends or any(end is None for end in ends):
        return "not known"
    return f"{ends[0]:.4f} to {ends[1]:.4f}"


def _inference_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the configuration that ``python -m monai.bundle run`` runs."""
    config: dict[str, Any] = json.loads((_TEMPLATES / "inference.json").read_text(encoding="utf-8"))
    if facts["input"]["kind"] == "ct_patches":
        config["candidates"] = "$@dataset_dir + '/candidates.csv'"
    return config | {"network_def": facts["network"]}
