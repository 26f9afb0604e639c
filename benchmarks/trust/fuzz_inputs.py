"""The families of inputs that ``fuzz.py`` mutates: valid inputs, and the reader of each."""

from __future__ import annotations

import gzip
import io
import json
import logging
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from omegaconf import OmegaConf
from torch import Tensor

import medfed
from medfed.config.compose import CONFIG_DIR, build, load
from medfed.federation.wire.channel import Channel, Link, compress, decompress
from medfed.federation.wire.codecs.base import HEADER_BYTES, Codec
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.federation.wire.packet import KINDS, EncodedPart, Message, Packet
from medfed.sites import wire
from medfed.sites.wire import framed

Read = Iterable[Tensor | np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Family:
    """Inputs of one kind."""

    name: str
    seeds: list[bytes]
    read: Callable[[bytes], Read]
    keep: int = 0
    share: int = 10


def families(folder: Path, files: bool = True) -> list[Family]:
    """Returns all families, or those of messages; files are made in ``folder``."""
    logging.getLogger("nibabel").setLevel(logging.CRITICAL + 1)
    torch.manual_seed(0)
    messages = [*_codecs(), _links(), _packets(), *_texts(), _of_sites()]
    if not files:
        return messages
    return [*messages, *_bundles(folder), *_images(folder), *_tables(folder)]


def _vectors() -> list[Tensor]:
    noise = torch.randn(97)
    return [noise, noise.round().sort().values, torch.zeros(40), 1e-6 * noise[:9], 1e37 * noise]


def configured() -> dict[str, Codec]:
    """Every configured codec by its name, without a list of them."""
    files = sorted((CONFIG_DIR / "codec").glob("*.yaml"))
    nodes: dict[str, Any] = {f.stem: OmegaConf.create({"node": OmegaConf.load(f)}) for f in files}
    return {name: build(node.node) for name, node in nodes.items()}


def _codecs() -> Iterable[Family]:
    for name, codec in configured().items():
        alike = [codec, *(c for c in codec.examples() if c.code == codec.code)]
        seeds = [_sent(c, v) for c in alike for v in _vectors()]

        def read(data: bytes, codec: Codec = codec) -> Read:
            # What it says itself, and what the receiver expects.
            return codec.decode(data), codec.decode(data, 97 if codec.read_header(data) else 0)

        full = [s for s in seeds if codec.read_header(s) in (0, 97)]
        yield Family(f"codec {name}", full, read, HEADER_BYTES, share=20)


def _sent(codec: Codec, vector: Tensor) -> bytes:
    try:
        return codec.encode(vector, np.random.default_rng(0))
    except ValueError:  # beyond the range of a codec that lengthens vectors
        return codec.encode(vector / 1e3, np.random.default_rng(0))


def _links() -> Family:
    """Every codec in every mode; the first byte of an input says which."""
    part = {"w": torch.randn(30, 2), "mean": torch.randn(4), "half": torch.randn(5).half()}
    options: list[dict[str, Any]] = [
        *({}, {"feedback": True}, {"feedback": False}, {"shift": "auto"}, {"shift": 0.5}),
        *({"zstd": 3}, {"zstd": 3, "shift": "auto"}),
    ]
    cases: list[tuple[Channel, EncodedPart, dict[str, Tensor]]] = []
    seeds = []
    for codec in configured().values():
        for given in options:
            channel = Channel(Link(codec, **given), buffers={"mean"})
            for kind in KINDS:
                message = Message("fit", {"shared": part}, kinds={"shared": kind})
                packet, memory = channel.encode(message, "up")
                first = len(cases).to_bytes(2, "little")
                cases.append((channel, packet.parts["shared"], {}))
                # Weights were sent before; the first time is the mode above.
                after, _ = channel.encode(message, "up", memory=memory)
                cases.append((channel, after.parts["shared"], memory))
                later = (len(cases) - 1).to_bytes(2, "little")
                seeds += [first + cases[-2][1].data, later + cases[-1][1].data]

    def read(data: bytes) -> Read:
        channel, part, memory = cases[int.from_bytes(data[:2], "little") % len(cases)]
        received = EncodedPart(part.kind, data[2:], part.layout)
        message, after = channel.decode(Packet("fit", {}, {"shared": received}), "up", memory)
        return [*message.parts["shared"].values(), *after.values()]

    return Family("links with memory", seeds, read, 2, share=100)


def _packets() -> Family:
    part = {"w": torch.randn(3, 2), "b": torch.randn(())}
    parts, kinds = {"shared": part, "sketch": part}, {"sketch": KINDS[-1]}
    messages = [Message(phase, parts, {"n": 3.0}, kinds) for phase in ("dense", "lossy")]
    lossy = Channel(Link(configured()["stc"], parts=["lossy/sketch"]), buffers={"b"})
    seeds = [lossy.encode(message, "up")[0].to_bytes() for message in messages]

    def read(data: bytes) -> Read:
        packet = Packet.from_bytes(data)
        packet.sizes(), packet.to_bytes()
        decoded, memory = lossy.decode(packet, "up")
        tensors = [t for part in decoded.parts.values() for t in part.values()]
        return [*tensors, *memory.values(), np.array([*decoded.scalars.values()])]

    return Family("packets", seeds, read, 8, share=60)


def _texts() -> Iterable[Family]:
    def unpacked(data: bytes) -> Read:
        return [np.frombuffer(decompress(data, limit=2**20), np.uint8)]

    def ledger(data: bytes) -> Read:
        found = Ledger.from_csv(data.decode("utf-8", "replace"))
        return [np.array([e.bytes for e in found.entries]), np.array([float(found.total())])]

    frames = [compress(d) for d in (bytes(5000), b"abc" * 9, torch.randn(99).numpy().tobytes())]
    yield Family("zstd", frames, unpacked, 5, share=20)
    entries = [Entry(r, "fit", c, "up", "shared", 20, 80) for r in (-1, 7) for c in ("a", "b, c")]
    yield Family("ledger", [Ledger(entries).to_csv().encode()], ledger, share=20)


def _of_sites() -> Family:
    """Requests to sites, and their replies."""
    clients = [wire.Client("a", 3), wire.Client("b, c", 4)]
    commit = wire.Commit("a", "0f", 3, 1, 0, 2, needed=[1, 2])
    begin = wire.Begin("a", "0f", clients=clients, job="x")
    body = torch.randn(9).numpy().tobytes()
    fit = wire.Fit("a", "0f", 3, 1, 2, 2, body, cohort=["a", "b, c"])
    metrics = {"loss": 0.5, "iou/whole": 1e-3, "auroc": float("nan")}
    measured = wire.Evaluate("a", "0f", 3, split="val", trained=True)
    greeting = wire.Greeting({"seed": "00"}, {"channels": ["x"]})
    replies: list[wire.Reply] = [
        wire.Committed.to(commit, steps=3, passes=(3, 0)),
        wire.Measured.to(measured, metrics=metrics),
        wire.Greeted.to(wire.Hello("a"), greeting=greeting),
        wire.declined(fit, "failed", "ValueError"),
    ]
    seeds = [m.to_bytes() for m in (commit, begin, fit, measured)]
    seeds += [reply.to_bytes() for reply in replies]

    def read(data: bytes) -> Read:
        fits = framed(data[20:])  # with a hash that fits
        reply = any(
            word in data for word in (b'"steps"', b'"metrics"', b'"greeting"', b'"declined"')
        )
        found = wire.Reply.from_bytes(fits) if reply else wire.Request.from_bytes(fits)
        return [np.array([found.round, found.attempt, found.phase, found.at])]

    return Family("requests to sites and replies", seeds, read, 24, share=20)


def _file(path: Path, read: Callable[[Path], Read]) -> Callable[[bytes], Read]:
    """Reads bytes as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def through(data: bytes) -> Read:
        path.write_bytes(data)
        return read(path)

    return through


def _member(path: Path, archive: bytes, name: str, read: Callable[[Path], Read]) -> Family:
    """Mutates one member of a zip archive, whose checksums then are right."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        members = {n: source.read(n) for n in source.namelist()}
    place = next(n for n in members if n.endswith(name))

    def through(data: bytes) -> Read:
        with zipfile.ZipFile(path, "w") as target:
            for member, content in {**members, place: data}.items():
                target.writestr(member, content)
        return read(path)

    return Family(f"{path.stem}, {name}", [members[place]], through, share=4)


_SHORT = (
    *("experiment=clinical_pfednet", "rounds=1", "local.steps=1"),
    *("logger=none", "progress=false"),
)


def _bundles(folder: Path) -> Iterable[Family]:
    from medfed.common.untrusted import read_tensors
    from medfed.config.description import checked
    from medfed.delivery.bundle.bundle import read_bundle, write_manifest
    from medfed.delivery.bundle.weights import load_weights
    from medfed.delivery.export.export import export_run
    from medfed.records.bundles import MODEL
    from medfed.records.places import MANIFEST, METADATA

    run = medfed.train(*_SHORT, folder=folder / "run").folder
    given = [f"run={run}", "bits=2", "client=hospital_0", "finetune_steps=0"]
    export_run(checked(load(given, "export")))
    bundle = run / "bundles" / "hospital_0"
    whole, other = (bundle / MODEL).read_bytes(), folder / "weights.pt"

    def read(file: Path) -> Read:
        return load_weights(file).values()

    yield Family("weights", [whole], _file(other, read), share=4)
    yield _member(other, whole, "data.pkl", read)

    def network(file: Path) -> Read:
        if file.name != Path(MANIFEST).name:
            write_manifest(file.parents[1])  # as who changed the file on purpose would
        return read_bundle(file.parents[1]).network().state_dict().values()

    for name in (METADATA, MANIFEST):
        file = Path(shutil.copytree(bundle, folder / Path(name).stem), name)
        yield Family(file.name, [file.read_bytes()], _file(file, network), share=4)

    def tensors(file: Path) -> Read:
        found: Mapping[str, Tensor] = read_tensors(file)
        return found.values()

    saved = safetensors.torch.save({"w": torch.randn(3, 2), "b": torch.randn(2).half()})
    yield Family("safetensors", [saved], _file(folder / "a.safetensors", tensors), 8, share=4)


def _images(folder: Path) -> Iterable[Family]:
    import nibabel
    import SimpleITK as sitk
    from PIL import Image

    from medfed.standalone.pictures import load_picture, read_mask
    from medfed.standalone.volumes import read_volume
    from medfed.standalone.voxels import check_finite

    voxels = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    kinds = (nibabel.Nifti1Image, nibabel.Nifti2Image)
    volumes = [kind(v, np.eye(4)).to_bytes() for kind in kinds for v in (voxels, voxels / 7)]

    def volume(path: Path) -> Read:  # as the readers of cases and prediction do
        found = read_volume(path)
        check_finite(found.voxels, [str(c) for c in range(len(found.voxels))], [path])
        return found.geometry.stored, found.voxels

    yield Family("nifti", volumes, _file(folder / "a.nii", volume), share=6)
    packed = [gzip.compress(v, mtime=0) for v in volumes]
    yield Family("nifti, gzip", packed, _file(folder / "a.nii.gz", volume), share=6)
    scan = sitk.GetImageFromArray(voxels)
    for name in ("a.mha", "a.mhd", "a.nrrd"):
        sitk.WriteImage(scan, str(folder / name))
    seeds = [(folder / "a.nrrd").read_bytes()]
    yield Family("nrrd", seeds, _file(folder / "a.nrrd", volume), share=6)

    def picture(path: Path) -> Read:
        return load_picture(path, "rgb", 1.0, "zscore"), read_mask(path)

    drawn = Image.fromarray((voxels * 4).astype(np.uint8)[0])
    for ending in ("png", "tiff"):
        drawn.save(file := folder / f"a.{ending}")
        yield Family(ending, [file.read_bytes()], _file(file, picture), share=4)

    for name in ("a.mha", "a.mhd"):
        seeds = [(folder / name).read_bytes()]
        yield Family(f"metaimage {name[1:]}", seeds, _file(folder / name, volume), share=6)


def _tables(folder: Path) -> Iterable[Family]:
    from medfed.datamodules.cache.store import map_array
    from medfed.datamodules.partitions.saved import read_partition
    from medfed.datamodules.readers.medmnist import read_medmnist
    from medfed.datamodules.readers.table import read_csv

    whole, array = io.BytesIO(), io.BytesIO()
    images, labels = np.zeros((4, 3, 3), np.uint8), np.arange(4).reshape(4, 1)
    splits = ("train", "val", "test")
    arrays: dict[str, Any] = {f"{s}_images": images for s in splits}
    arrays |= {f"{s}_labels": labels for s in splits}
    np.savez(whole, **arrays)
    np.save(array, images)
    path = folder / "images.npz"

    def npz(path: Path) -> Read:
        return [read_medmnist(path).images]

    yield Family("npz", [whole.getvalue()], _file(path, npz), share=4)
    yield _member(path, whole.getvalue(), "train_images.npy", npz)
    yield _member(path, whole.getvalue(), "train_labels.npy", npz)
    mapped = _file(folder / "a.npy", lambda p: [map_array(p)])
    yield Family("npy", [array.getvalue()], mapped, share=6)

    def partition(path: Path) -> Read:
        return [np.array(len(read_partition(path)["clients"]))]

    saved = {"clients": {"a": {"train": ["p", "q"]}, "b": ["r"]}, "partition": {"a": {"n": 1.5}}}
    text = [json.dumps(saved).encode()]
    yield Family("partition.json", text, _file(folder / "splits.json", partition), share=6)

    def table(path: Path) -> Read:
        found = read_csv(path, "label", centre="centre")
        return [found.labels]  # a cell that is missing is NaN by intention

    text = [b"age,size,centre,label\n61,2.5,a,0\n45,,b,1\n" + b"50,1e3,a,1\n" * 5]
    yield Family("table", text, _file(folder / "table.csv", table), share=6)
