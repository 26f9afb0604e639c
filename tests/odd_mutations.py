"""Headers and cells with one or two odd values, read by medfed and by another reader.

What medfed reads must be what the other reads; where the other refuses, medfed must refuse, too, in
one sentence that names the file. Mutation n depends on the seed and n alone.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import random
import re
import struct
import unicodedata
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom

from medfed.datamodules.plans import by_id
from medfed.datamodules.readers.case_folders import FolderReader
from medfed.datamodules.readers.datalist import DatalistReader
from medfed.datamodules.readers.medmnist import read_medmnist
from medfed.standalone.csv_files import MISSING
from medfed.standalone.errors import MedfedError
from medfed.standalone.pictures import picture_header, read_picture
from medfed.standalone.volumes import read_volume
from medfed.standalone.voxels import check_finite
from tests.datamodules.test_dicom import plain, save
from tests.odd_files import compared, heard, sentence_of
from tests.odd_sets import HEADER, ROWS, a_list, folders, read_table, text_of
from tests.odd_volumes import LPS, Truth, by_pydicom, metaimage, noise, nrrd, straight


class RefusedError(Exception):
    """The other reader cannot read it, either."""


@dataclass(frozen=True)
class Kind:
    """A format, and how it is mutated and read.

    Attributes:
        make: Writes a mutated file into a folder, and returns it and what was changed.
        verdict: Reads it both ways; empty if that is right, and otherwise what is wrong.
    """

    make: Callable[[Path, random.Random], tuple[Path, str]]
    verdict: Callable[[Path], str]


def mutated(number: int, folder: Path, seed: int = 0, only: str | None = None) -> tuple[str, str]:
    """Makes and reads a mutation.

    Returns:
        What it is, and what is wrong with it: empty for nothing.
    """
    name = only or [*KINDS][number % len(KINDS)]
    rng = random.Random(f"{seed}/{name}/{number}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries
        path, change = KINDS[name].make(folder, rng)
        return f"{number}, {name}: {change}", KINDS[name].verdict(path)


def volume_verdict(other: Callable[[Path], Truth]) -> Callable[[Path], str]:
    def verdict(path: Path) -> str:
        try:
            with heard():
                volume = read_volume(path)
                channels = [str(n) for n in range(len(volume.voxels))]
                check_finite(volume.voxels, channels, [path])
        except MedfedError as error:
            return sentence_of(error, path) or ""
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        try:
            truth = other(path)
        except RefusedError as error:
            return f"it is read, but another reader refuses: {error}"
        except Exception as error:
            return f"it is read, but another reader fails: {type(error).__name__}: {error}"
        found = compared(volume.voxels.numpy(), volume.geometry.affine, truth, 1e-5)
        return "; ".join(f"{k}: {v}" for k, v in found.items() if v.startswith("WRONG"))

    return verdict


# NIfTI, read as its standard says

ODD = (0, 1, -1, 2, 3, 5, 7, 9, 100, 255, -128, 32767, -32768)
ODD_FLOATS = (0.0, -1.0, 1e-30, 1e-6, 0.5, 2.0, 1e6, 1e30, -1e30, np.nan, np.inf, -np.inf)
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4",
         1024: "i8", 1280: "u8"}  # fmt: skip


def odd_nifti(folder: Path, rng: random.Random) -> tuple[Path, str]:
    affine = straight() @ np.diag([rng.choice((1, -1)), 1, 1, 1])
    image = nib.Nifti1Image(noise(), affine)
    image.header.set_qform(affine, rng.choice((0, 1)))
    content = image.to_bytes()
    header = nib.Nifti1Header.from_fileobj(io.BytesIO(content)).structarr.copy()
    said = []
    for _ in range(rng.choice((1, 1, 2))):
        field = rng.choice(header.dtype.names)
        if header.dtype[field].base.kind == "S":
            continue
        floats = header.dtype[field].base.kind == "f"
        value = rng.choice(ODD_FLOATS if floats else ODD)
        if header.dtype[field].shape:
            at = rng.randrange(header.dtype[field].shape[0])
            header[field][at] = value
            said.append(f"{field}[{at}]={value}")
        else:
            limits = None if floats else np.iinfo(header.dtype[field])
            header[field] = value if limits is None else max(limits.min, min(limits.max, value))
            said.append(f"{field}={value}")
    path = folder / "a.nii"
    path.write_bytes(header.tobytes() + content[348:])
    return path, ", ".join(said)


def by_standard(path: Path) -> Truth:
    """NIfTI-1 by the words of nifti1.h."""
    content = path.read_bytes()
    head = np.frombuffer(content[:348], nib.Nifti1Header.template_dtype.newbyteorder("<"))[0]
    if head["magic"] not in (b"n+1", b"ni1"):
        raise RefusedError("no header of NIfTI")
    axes = int(head["dim"][0])
    if not 3 <= axes <= 4:
        raise RefusedError(f"{axes} axes")
    shape = [int(n) for n in head["dim"][1 : axes + 1]]
    code = int(head["datatype"])
    if code not in TYPES or min(shape) < 1:
        raise RefusedError(f"type {code}, shape {shape}")
    kind = np.dtype(f"<{TYPES[code]}")
    start, length = float(head["vox_offset"]), int(np.prod(shape)) * kind.itemsize
    if not 352 <= start < 1e9 or start % 1 or len(content) < start + length:
        raise RefusedError(f"voxels from {start}")
    voxels = np.frombuffer(content[int(start) :][:length], kind).reshape(shape, order="F")
    slope, intercept = float(head["scl_slope"]), float(head["scl_inter"])
    if slope != 0 and np.isfinite(slope):
        if not np.isfinite(intercept):
            raise RefusedError("an intercept that is no number")
        voxels = voxels * slope + intercept
    affine, steps = np.eye(4), np.abs(head["pixdim"][1:4].astype(float))
    if 0 < head["sform_code"] <= 5:  # others are none of the standard's
        affine[:3] = [head[f"srow_{axis}"] for axis in "xyz"]
    elif 0 < head["qform_code"] <= 5:
        b, c, d = (float(head[f"quatern_{n}"]) for n in "bcd")
        if (rest := 1 - b * b - c * c - d * d) < -1e-5:
            raise RefusedError("a quaternion that is longer than 1")
        a = np.sqrt(max(rest, 0))
        turn = np.array([
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - c * c - b * b],
        ])  # fmt: skip
        sign = -1 if head["pixdim"][0] < 0 else 1
        affine[:3, :3] = turn * steps * [1, 1, sign]
        affine[:3, 3] = [head[f"qoffset_{n}"] for n in "xyz"]
    else:
        raise RefusedError("no place")
    scale = {1: 1e3, 3: 1e-3}.get(int(head["xyzt_units"]) & 7, 1.0)
    if not np.isfinite(affine).all():
        raise RefusedError("a place that is no number")
    return Truth(voxels, np.diag([scale, scale, scale, 1]) @ affine)


def nifti_verdict(path: Path) -> str:
    wrong = volume_verdict(by_standard)(path)
    # Without forms the standard names no side, which a line says.
    return "" if wrong.endswith("no place") else wrong


# NRRD and MetaImage, read from their text

WORDS = ("", "0", "-1", "nan", "1e400", "3.5", "left", "none", "(1,2)", "\"mm\"", "x" * 300, "2 2",
         "true", "µ", "1,5", "0x10", "raw", "short", "3")  # fmt: skip


def odd_text(head: list[str], rng: random.Random, mark: str) -> str:
    """Changes a line, a word of it, or the order; says what."""
    at = rng.randrange(1, len(head))
    how = rng.choice(("word", "word", "word", "word", "delete", "twice", "swap", "value"))
    if how == "delete":
        return f"without {head.pop(at)!r}"
    if how == "twice":
        head.insert(at, head[at])
        return f"twice {head[at]!r}"
    if how == "swap":
        other = rng.randrange(1, len(head))
        head[at], head[other] = head[other], head[at]
        return f"{head[at]!r} and {head[other]!r} exchanged"
    key, equals, value = head[at].partition(mark)
    words = value.split()
    if how == "value" or not words:
        head[at] = f"{key}{equals}{rng.choice(WORDS)}"
    else:
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        head[at] = f"{key}{equals}{' '.join(words)}"
    return repr(head[at][:60])


def odd_nrrd(folder: Path, rng: random.Random) -> tuple[Path, str]:
    path = nrrd(space=rng.choice(("LPS", "right-anterior-superior")),
                space_units='"mm" "mm" "mm"')(folder)  # fmt: skip
    text, _, voxels = path.read_bytes().partition(b"\n\n")
    head = text.decode().split("\n")
    said = odd_text(head, rng, ": ")
    path.write_bytes("\n".join(head).encode() + b"\n\n" + voxels)
    return path, said


def _numbers(text: str, count: int) -> list[float]:
    found = [float(t) for t in re.split(r"[\s,()]+", text) if t]
    if len(found) != count or not np.isfinite(found).all():
        raise RefusedError(f"{text!r} has not {count} numbers")
    return found


def by_nrrd(path: Path) -> Truth:
    """The fields that `nrrd` writes."""
    text, _, content = path.read_bytes().partition(b"\n\n")
    lines = [line for line in text.decode().split("\n")[1:] if not line.startswith("#")]
    fields = dict(line.split(": ", 1) for line in lines if ": " in line)
    try:
        kinds = {"short": "i2", "int16": "i2", "signed short": "i2"}
        order = {"little": "<", "big": ">"}[fields["endian"].strip()]
        kind = np.dtype(order + kinds[fields["type"].strip()])
        if fields["encoding"].strip() != "raw" or fields["dimension"].strip() != "3":
            raise RefusedError("another encoding or dimension")
        shape = [int(n) for n in _numbers(fields["sizes"], 3)]
        steps = np.reshape(_numbers(fields["space directions"], 9), (3, 3)).T
        origin = _numbers(fields.get("space origin", "0 0 0"), 3)
        space = fields["space"].strip().lower()
        signs = {"lps": (-1, -1, 1), "left-posterior-superior": (-1, -1, 1), "ras": (1, 1, 1),
                 "right-anterior-superior": (1, 1, 1)}[space]  # fmt: skip
    except (KeyError, ValueError) as error:
        raise RefusedError(f"{type(error).__name__} {error}") from error
    if len(content) != np.prod(shape) * 2:
        raise RefusedError(f"{len(content)} bytes for {shape}")
    voxels = np.frombuffer(content, kind).reshape(shape, order="F")
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = steps, origin
    return Truth(voxels, np.diag([*signs, 1.0]) @ affine)


def odd_metaimage(folder: Path, rng: random.Random) -> tuple[Path, str]:
    path = metaimage(name="a.mhd")(folder)
    head = path.read_text().strip().split("\n")
    said = odd_text(head, rng, " = ")
    path.write_text("\n".join(head) + "\n")
    return path, said


def by_metaimage(path: Path) -> Truth:
    """The fields that ITK writes."""
    fields: dict[str, str] = {}
    for line in path.read_text().split("\n"):
        key, _, value = line.partition("=")
        if fields.setdefault(key.strip(), value.strip()) != value.strip():
            raise RefusedError(f"{key} twice")
        if key.strip() == "ElementDataFile":
            break
    try:
        if fields["NDims"] != "3" or fields.get("CompressedData", "")[:1] in ("T", "t", "1"):
            raise RefusedError("another dimension, or packed")
        shape = [int(n) for n in _numbers(fields["DimSize"], 3)]
        order = ">" if fields.get("BinaryDataByteOrderMSB", "")[:1] in ("T", "t", "1") else "<"
        kind = np.dtype({"MET_SHORT": f"{order}i2"}[fields["ElementType"]])
        steps = _numbers(fields.get("ElementSpacing", fields.get("ElementSize", "1 1 1")), 3)
        turn = np.reshape(_numbers(fields.get("TransformMatrix", "1 0 0 0 1 0 0 0 1"), 9), (3, 3))
        origin = _numbers(fields.get("Offset") or "0 0 0", 3)
        content = (path.parent / fields["ElementDataFile"]).read_bytes()
    except (KeyError, ValueError, OSError) as error:
        raise RefusedError(f"{type(error).__name__} {error}") from error
    if len(content) != np.prod(shape) * 2:
        raise RefusedError(f"{len(content)} bytes for {shape}")
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = turn.T * steps, origin
    return Truth(np.frombuffer(content, kind).reshape(shape, order="F"), LPS @ affine)


# DICOM

ELEMENTS = (
    "Rows", "Columns", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
    "SamplesPerPixel", "PhotometricInterpretation", "PixelSpacing", "ImagePositionPatient",
    "ImageOrientationPatient", "RescaleSlope", "RescaleIntercept", "SliceThickness",
    "SeriesInstanceUID", "SOPClassUID", "NumberOfFrames", "InstanceNumber", "PixelData",
    "SpacingBetweenSlices", "SmallestImagePixelValue",
)  # fmt: skip
ODD_DICOM: dict[str, Sequence[Any]] = {
    "US": (0, 1, 2, 7, 8, 12, 15, 16, 32, 65535),
    "DS": (b"0", b"-1", b"1e30", b"nan", b"x", b"", b"1,5", b"0.000001", b"2"),
    "IS": (b"0", b"1", b"4", b"-1", b"x", b"9999999"),
    "CS": (b"MONOCHROME1", b"RGB", b"PALETTE COLOR", b"", b"x"),
    "UI": (b"1.2.3", b"", b"x", b"1.2.840.10008.5.1.4.1.1.481.3"),
}


def odd_dicom(folder: Path, rng: random.Random) -> tuple[Path, str]:
    name, whole = rng.choice(ELEMENTS), rng.random() < 0.5
    one = int(rng.random() * 4)
    tag = pydicom.tag.Tag(name)
    kind = pydicom.datadict.dictionary_VR(tag)
    kind = kind.split(" or ")[0]
    choices = ODD_DICOM.get(kind, (None,))
    value, at, delete = rng.choice(choices), rng.randrange(6), rng.random() < 0.15
    pixels = noise((4, 8, 6)).astype(np.uint16)
    for k in range(4):
        of = plain(pixels, k, 2.0 * k)
        if whole or k == one:
            if delete:
                of.pop(tag, None)
                if name == "BitsAllocated":  # without it pydicom cannot write
                    of["PixelData"].VR = "OW"
            elif name == "PixelData":
                of.PixelData = of.PixelData[: at * 10]
            elif kind == "US":
                of.add_new(tag, "US", value)
            else:
                old = of.get(tag)
                parts = [str(v).encode() for v in np.atleast_1d(old.value)] if old else [b"1"]
                parts[at % len(parts)] = value
                of[tag] = pydicom.dataelem.RawDataElement(
                    tag, kind, len(joined := b"\\".join(parts)), joined, 0, False, True
                )
        with pydicom.config.disable_value_validation():
            save(of, folder / f"{k}.dcm")
    where = "all" if whole else f"slice {one}"
    return folder, f"{name} of {where}: {'deleted' if delete else (value, at)}"


def dicom_other(folder: Path) -> Truth:
    try:
        kind = "MONOCHROME1"
        heads = [pydicom.dcmread(f) for f in sorted(folder.iterdir())]
        truth = by_pydicom(folder)
        turned = [d.PhotometricInterpretation == kind for d in heads]
        if any(turned):
            slope = [float(d.get("RescaleSlope", 1)) for d in heads]
            less = [float(d.get("RescaleIntercept", 0)) for d in heads]
            top = [(1 << d.BitsStored) - 1 for d in heads]
            raw = [(truth.voxels[..., k] - less[k]) / slope[k] for k in range(len(turned))]
            raw = [top[k] - r if turned[k] else r for k, r in enumerate(raw)]
            again = [r * slope[k] + less[k] for k, r in enumerate(raw)]
            truth = Truth(np.stack(again, axis=-1), truth.affine)
        return truth
    except Exception as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error


# Tables

CELLS = (
    "", " ", "NA", "n/a", "-", "--", "?", "unknown", "0", "-0", "1", "1.0", "01", "1e3", "1E5",
    "1e400", "inf", "-inf", "nan", "1,5", "1.5", "1 5", "1_5", "0x1F", "<5", ">= 3", "5%", "12 mg",
    "2019-01-01", "10:30", "yes", "TRUE", "é", "e\u0301", "\u200b7", "\u00a07", "\u0667", "7\u00b2",
    "½", "=1+1", "'7", '"7"', "a\nb", "a,b", "a;b", "x" * 300, "\ufeff7", "P001", "p001", "P001 ",
)  # fmt: skip


def odd_table(folder: Path, rng: random.Random) -> tuple[Path, str]:
    rows = [list(row) for row in (HEADER, *ROWS)]
    said = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(rows)) if rng.random() < 0.9 else 0
        column, cell = rng.randrange(len(HEADER)), rng.choice(CELLS)
        how = rng.random()
        if how < 0.9:
            rows[at][column] = cell
            said.append(f"row {at}, {HEADER[column]}={cell[:20]!r}")
        elif how < 0.95:
            rows.insert(at, list(rows[at]))
            said.append(f"row {at} twice")
        else:
            rows[at].insert(column, cell)
            said.append(f"row {at} with {cell[:20]!r} more")
    path = folder / "t.csv"
    path.write_text(text_of(rows), "utf-8", newline="")
    return path, ", ".join(said)


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def table_verdict(path: Path) -> str:
    try:
        with heard():
            found = read_table()(path)
    except MedfedError as error:
        return sentence_of(error, path) or ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with path.open(encoding="utf-8-sig", newline="") as file:
        head, *rows = [row for row in csv.reader(file) if "".join(row).strip()]
    at = {name.strip(): n for n, name in enumerate(head)}
    if found["count"] != len(rows):
        return f"{found['count']} rows, but {len(rows)}"
    people = [(_folded(row[at["patient"]]), _folded(row[at["hospital"]])) for row in rows]
    if [(_bare(a), _bare(b)) for a, b in found["patients"]] != [
        (_bare(a), _bare(b)) for a, b in people
    ]:
        return f"patients {found['patients']}, but {people}"
    for name, column in found["values"].items():
        if name not in at:
            return f"a column {name!r}"
        for got, row in zip(column, rows, strict=True):
            text = _folded(row[at[name]])
            if _is_missing(text):
                right = got is None
            elif isinstance(got, str):
                right = _bare(got) == _bare(text)
            else:
                try:
                    right = got == float(text)
                except ValueError:
                    right = False
            if not right:
                return f"column {name}: {text!r} is read as {got!r}"
    return ""


def _is_missing(text: str) -> bool:
    return text.lower() in MISSING


def _bare(text: str) -> str:
    """Without what the reader may take from a whole number, or from a formula's quote."""
    text = re.sub(r"^'(?=[=+@-])", "", text)
    return re.sub(r"^(-?\d+)\.0*$", r"\1", text)


# Lists

VALUES: Sequence[Any] = (
    None, "", 0, 1, -1, 3.5, True, [], {}, "x", "../c0.nii.gz", "imagesTr", "imagesTr/c1.nii.gz",
    ["imagesTr/c1.nii.gz"], [None], {"0": "a", "1": "b"}, {"a": 1}, {"background": 0, "x": [1, 1]},
    "imagesTr\\c1.nii.gz", "\u200b", 1e300, "~", "/nowhere", {"0": "b", "1": "b"},
)  # fmt: skip


def odd_list(folder: Path, rng: random.Random) -> tuple[Path, str]:
    path = a_list([{"patient": f"p{n}", "centre": "h"} for n in range(4)])(folder)
    content = json.loads(path.read_text())
    place: Any = content
    keys: list[Any] = []
    while True:
        key = rng.choice([*place] if isinstance(place, dict) else range(len(place)))
        keys.append(key)
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.2:
            break
        place = place[key]
    how, value = rng.random(), copy.deepcopy(rng.choice(VALUES))
    if how < 0.15:
        del place[key]
        value = "deleted"
    else:
        place[key] = value
    path.write_text(json.dumps(content))
    return path, f"{keys}: {value!r}"


def list_verdict(path: Path) -> str:
    try:
        with heard():
            reader = DatalistReader(path)
            patients = [*by_id(reader.patients()).values()]
            cases = [case for p in patients for case in reader.cases_of(p)]
            read = [(case, reader.raw(case)) for case in cases]
            reader.record(), reader.layout()
    except MedfedError as error:
        return sentence_of(error, path) or ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    content = json.loads(path.read_text())
    training = content["training"]
    if len(cases) != len(training):
        return f"{len(cases)} cases, but {len(training)} are listed"
    wanted = {str(e["patient"]) if e.get("patient") is not None else None for e in training}
    named = {p.id for p in patients}
    if None not in wanted and named != {_folded(str(w)) for w in wanted}:
        return f"patients {named}, but {wanted}"
    for case, tensors in read:
        for role, key in (("image", "image"), ("label", "label")):
            file = next(f for r, f in case.files.items() if (r == "label") == (role == "label"))
            there = np.sort(np.asanyarray(nib.load(file).dataobj), None)  # type: ignore[attr-defined]
            if role == "image" and (np.sort(tensors["image"].numpy(), None) != there).any():
                return f"the voxels of {file.name}"
            if not any(file.name in json.dumps(e.get(key)) for e in training):
                return f"{file.name} is not listed as {key}"
    return ""


# Hospitals of cases

CASES = ("a", "b", "c", "d")


def odd_centres(folder: Path, rng: random.Random) -> tuple[Path, str]:
    (folder / "cases").mkdir()
    folders(CASES)(folder / "cases")
    rows = [["case", "hospital"], *([name, f"h{n % 2}"] for n, name in enumerate(CASES))]
    said = []
    for _ in range(rng.choice((1, 2))):
        at, how, cell = rng.randrange(len(rows)), rng.random(), rng.choice((*CELLS, "H0", "h1 "))
        if how < 0.8:
            rows[at][column := rng.randrange(len(rows[at]))] = cell
            said.append(f"row {at}, {column}: {cell[:20]!r}")
        elif how < 0.9:
            rows.insert(at, list(rows[at]))
            said.append(f"row {at} twice")
        else:
            said.append(f"without row {at}: {rows.pop(at)}")
    path = folder / "cases" / "centres.csv"
    path.write_text(text_of(rows), "utf-8", newline="")
    return path, ", ".join(said)


def centres_verdict(path: Path) -> str:
    try:
        with heard():
            reader = FolderReader(path.parent, {"CT": "ct.nii.gz"}, "m.nii.gz", None)
            found = {p.id: p.centre for p in by_id(reader.patients()).values()}
    except MedfedError as error:
        return sentence_of(error, path) or ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [[_bare(_folded(cell)) for cell in row] for row in csv.reader(file)]
    named: dict[str, set[str]] = {}
    header = rows[0][0] not in CASES  # a first line that names a case is none
    for case, hospital in rows[header:]:
        named.setdefault(case, set()).add(hospital)
    for case, centre in found.items():
        if {_bare(str(centre))} != named.get(case):
            return f"case {case} is at {centre!r}, but at {named.get(case)}"
    return "" if sorted(found) == sorted(CASES) else f"cases {sorted(found)}"


# Pictures: PNG and TIFF as their standards say, without compression of TIFF

SIZE = (9, 7)  # rows, columns


def pixels(bits: int) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 1 << bits, SIZE)
    return values.astype(np.uint8 if bits == 8 else np.uint16)


def chunk(kind: bytes, body: bytes, crc: int | None = None) -> bytes:
    crc = zlib.crc32(kind + body) if crc is None else crc
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)


def odd_png(folder: Path, rng: random.Random) -> tuple[Path, str]:
    bits = rng.choice((8, 16))
    rows = pixels(bits).astype(f">u{bits // 8}")
    head = [SIZE[1], SIZE[0], bits, 0, 0, 0, 0]
    at, value = rng.randrange(len(head)), rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 255))
    head[at] = value if at > 1 else rng.choice((value, 1 << 20, 1 << 31))
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    data = bytearray(zlib.compress(body))
    said = [f"{('width', 'height', 'bits', 'colours', 'compression', 'filter', 'interlace')[at]}"]
    said[0] += f"={head[at]}"
    if rng.random() < 0.2:
        data[place := rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        said.append(f"a bit of byte {place} of the data")
    crc = rng.choice((None, None, None, 0))
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", *head), crc), chunk(b"IDAT", bytes(data))]
    if rng.random() < 0.3:
        name = rng.choice((b"tEXt", b"gAMA", b"zTXt", b"iCCP", b"pHYs", b"tRNS", b"PLTE", b"abCd"))
        parts.insert(1, chunk(name, rng.randbytes(rng.choice((0, 1, 4, 9)))))
        said.append(f"a chunk {name.decode()}")
    path = folder / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b""))
    return path, ", ".join([*said, "crc 0"] if crc == 0 else said)


def by_png(path: Path) -> np.ndarray:
    """The samples of a grey PNG without filters, by the words of its standard."""
    content, at, data, head = path.read_bytes(), 8, b"", b""
    while at < len(content):
        (size,), kind = struct.unpack_from(">I", content, at), content[at + 4 : at + 8]
        body = content[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            head = body
        data += body * (kind == b"IDAT")
        if (
            kind == b"tRNS"
            or zlib.crc32(kind + body) != struct.unpack_from(">I", content, at + 8 + size)[0]
        ):
            raise RefusedError("a transparent value, or a wrong sum")
        at += 12 + size
    width, height, bits, *others = struct.unpack(">IIBBBBB", head)
    if others != [0] * 4 or bits not in (8, 16) or not 0 < width * height < 1e6:
        raise RefusedError(f"{bits} bits, {others}")
    rows, step = zlib.decompress(data), 1 + width * bits // 8
    if len(rows) != height * step or any(rows[::step]):
        raise RefusedError("other data than the header says")
    lines = [rows[n * step + 1 : (n + 1) * step] for n in range(height)]
    return np.frombuffer(b"".join(lines), f">u{bits // 8}").reshape(height, width)


TAGS = {256: SIZE[1], 257: SIZE[0], 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: SIZE[0], 279: 0}


def odd_tiff(folder: Path, rng: random.Random) -> tuple[Path, str]:
    bits = rng.choice((8, 16))
    data = pixels(bits).astype(f"<u{bits // 8}").tobytes()
    data += b"\0" * (len(data) % 2)
    tags = {**TAGS, 258: bits, 279: len(data)}
    entries = [[tag, 4 if tag in (273, 279) else 3, 1, value] for tag, value in tags.items()]
    entry = rng.choice(entries)
    field, value = rng.choice((0, 1, 2, 3, 3, 3)), rng.choice((0, 1, 2, 3, 5, 7, 8, 9, 274, 65535))
    entry[field] = value
    said = f"tag {entry[0]}, {('tag', 'type', 'count', 'value')[field]}={value}"
    body = b"".join(struct.pack("<HHII", *e) for e in entries)
    path = folder / "a.tif"
    start = struct.pack("<2sHI", b"II", 42, 8 + len(data))
    path.write_bytes(start + data + struct.pack("<H", len(entries)) + body + bytes(4))
    return path, said


def by_tiff(path: Path) -> np.ndarray:
    """The samples of a grey TIFF in one strip, by the words of its standard."""
    content = path.read_bytes()
    (at,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, at)
    found = [struct.unpack_from("<HHII", content, at + 2 + 12 * n) for n in range(count)]
    tags = {tag: value for tag, _, _, value in found}
    odd = [f for f in found if f[1] not in (3, 4) or f[2] != 1 or (f[1] == 3 and f[3] > 65535)]
    if odd or len(tags) < len(found) or {*tags} != {*TAGS}:
        raise RefusedError(f"other tags: {odd}")
    width, height, bits, start = (tags[n] for n in (256, 257, 258, 273))
    usual = tags[259] == 1 == tags[277] and tags[262] in (0, 1) and bits in (8, 16)
    size = width * height * bits // 8
    if (
        not usual
        or not 0 < height <= tags[278]
        or not size
        or size > min(tags[279], len(content) - start)
    ):
        raise RefusedError("another form")
    values = np.frombuffer(content[start : start + size], f"<u{bits // 8}").reshape(height, width)
    return values if tags[262] else (1 << bits) - 1 - values


def picture_verdict(other: Callable[[Path], np.ndarray]) -> Callable[[Path], str]:
    def verdict(path: Path) -> str:
        try:
            with heard():
                read, white = read_picture(path, "grey")
                width, height, _ = picture_header(path)
        except MedfedError as error:
            return sentence_of(error, path) or ""
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if read.shape != (1, height, width):
            return f"pixels {read.shape}, but {(height, width)}"
        try:
            truth = other(path)
        except (RefusedError, zlib.error):  # Pillow reads more forms, and mends some
            return ""
        if white != (1 << 8 * truth.itemsize) - 1:
            return f"white is {white}, but pixels have {8 * truth.itemsize} bits"
        return "" if truth.shape == read.shape[1:] and (read[0] == truth).all() else "other pixels"

    return verdict


# Arrays of MedMNIST's form


def odd_npz(folder: Path, rng: random.Random) -> tuple[Path, str]:
    random_ = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 6), ("val", 4), ("test", 4)):
        arrays[f"{split}_images"] = random_.integers(0, 255, (count, 5, 4), np.uint8)
        arrays[f"{split}_labels"] = random_.permutation(np.arange(count) % 2)[:, None]
    chosen, how, said = rng.choice([*arrays]), rng.random(), ""
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w") as file:
        for name, array in arrays.items():
            held = io.BytesIO()
            np.save(held, array)
            content, member = bytearray(held.getvalue()), f"{name}.npy"
            if name == chosen:
                end = 10 + int.from_bytes(content[8:10], "little")
                if how < 0.6:  # another word of the header, of the same length
                    text = content[10:end].decode()
                    old = rng.choice(re.findall(r"\d+|False|[<|]\w\d|'\w+'|[(),:{}]", text))
                    new = rng.choice(
                        (
                            "0",
                            "1",
                            "-1",
                            "7",
                            "True",
                            "'<f8'",
                            "<i2",
                            "|b1",
                            "|O8",
                            "()",
                            "x",
                            "9" * 9,
                        )
                    )
                    text, said = text.replace(old, new, 1), f"{old} -> {new}"
                    text = text.rstrip()[: end - 11].ljust(end - 11) + "\n"
                    content[10:end] = text.encode()
                elif how < 0.7:
                    content[at := rng.randrange(10)] = rng.randrange(256)
                    said = f"byte {at}"
                elif how < 0.8:
                    content, said = content[: rng.randrange(len(content))], "cut"
                elif how < 0.9:
                    member, said = (
                        rng.choice(("x.npy", name, f"{name}.NPY", f"a/{name}.npy")),
                        "name",
                    )
                else:
                    content[-array.itemsize :] = rng.randbytes(array.itemsize)
                    said = "the last cell"
            file.writestr(member, bytes(content))
    return path, f"{chosen}: {said}"


def npz_verdict(path: Path) -> str:
    try:
        with heard():
            read = read_medmnist(path)
    except MedfedError as error:
        return sentence_of(error, path) or ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    splits = ("train", "val", "test")
    with np.load(path, allow_pickle=False) as arrays:
        images = np.concatenate([arrays[f"{split}_images"] for split in splits])
        labels = np.concatenate([arrays[f"{split}_labels"] for split in splits])
    if (read.samples.labels.reshape(labels.shape) != labels).any():
        return f"labels {read.samples.labels}, but {labels}"
    return "" if (np.sort(read.images, None) == np.sort(images, None)).all() else "other pixels"


KINDS: Mapping[str, Kind] = {
    "NIfTI": Kind(odd_nifti, nifti_verdict),
    "table": Kind(odd_table, table_verdict),
    "NRRD": Kind(odd_nrrd, volume_verdict(by_nrrd)),
    "MetaImage": Kind(odd_metaimage, volume_verdict(by_metaimage)),
    "DICOM": Kind(odd_dicom, volume_verdict(dicom_other)),
    "list": Kind(odd_list, list_verdict),
    "centres.csv": Kind(odd_centres, centres_verdict),
    "PNG": Kind(odd_png, picture_verdict(by_png)),
    "TIFF": Kind(odd_tiff, picture_verdict(by_tiff)),
    "npz": Kind(odd_npz, npz_verdict),
}
