"""Lesions in CT scans: boxes in mm, a JSON file for each scan and a table in LUNA16's columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from . import dicom
from .ct import ScanSpec, read_scan, world_of
from .files import sha256, write_json, writing
from .predictor import Predictor
from .samples import write_csv
from .scans import ScanFiles, find_scans
from .volumes import read_geometry

TABLE = "detections.csv"
_HEADER = ("seriesuid", "coordX", "coordY", "coordZ", "probability")
_AXES = "x to the patient's left, y to the back, z to the head; sizes along the scan's nearest axes"


def find_ct(source: Path, output: Path) -> dict[str, ScanFiles]:
    """Lists the CT scans that an input names: one volume, or all below a folder."""
    scans = find_scans(source, {"present": (), "input": {}}, output)  # one contrast, of any name
    known = Counter(Path(scan.id).name for scan in scans)
    named = ((Path(scan.id).name, scan) for scan in scans)
    return {name if known[name] == 1 else scan.id: scan for name, scan in named}


def boxes_file(scan: ScanFiles, output: Path) -> Path:
    """Returns the JSON file of a scan in the folder of results."""
    return output / f"{scan.id}_boxes.json"


def detect(predictor: Predictor, name: str, path: Path, file: Path) -> list[float]:
    """Finds the lesions of a scan, which is prepared as in training, and writes them."""
    facts = predictor.facts
    spec = ScanSpec(facts["input"]["spacing"], facts["normalization"]["hu"])
    image = torch.from_numpy(spec.values.take(read_scan(path, spec)))[None, None]
    boxes, scores = predictor.boxes(image, path)
    low, high = boxes.double().numpy().reshape(-1, 2, 3).swapaxes(0, 1)
    world = world_of(read_geometry(path, "LPS"), (low + high) / 2, spec.spacing).round(4)
    sides = ((high - low) * spec.spacing)[:, [1, 0, 2]].round(4)
    boxes_of_rows = zip(world.tolist(), sides.tolist(), scores.tolist(), strict=True)
    content = {
        "seriesuid": (dicom.series_uid(path) if path.is_dir() else "") or name,
        "bundle_manifest_sha256": sha256(Path(predictor.name) / "configs" / "manifest.json"),
        "axes": _AXES,
        "boxes": [{"centre_mm": c, "size_mm": s, "probability": p} for c, s, p in boxes_of_rows],
    }
    with writing(file, "choose another output"):
        write_json(file, content)
    return [*scores.tolist()]


def save_detections(files: Iterable[Path], folder: Path) -> None:
    """Writes the boxes of many scans as one table, with a header alone where none is found."""
    scans = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    rows = [[s["seriesuid"], *b["centre_mm"], b["probability"]] for s in scans for b in s["boxes"]]
    write_csv(folder / TABLE, _HEADER, rows)
