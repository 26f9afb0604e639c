"""Volumes in every shape that scanners, archives and other programs give them.

Each `Volume` makes its files, and says what another library reads in them, or that medfed must
refuse them, in which words.
"""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np
import pydicom
import SimpleITK as sitk
from numpy.typing import NDArray
from PIL import Image
from pydicom import uid
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate

from tests.datamodules.test_dicom import SEG, base, frames, plain, save, series
from tests.datamodules.volume_files import unchanged_locale

Array = NDArray[Any]
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
SPACING = (0.5, 0.75, 2.0)
SHAPE = (6, 5, 4)


class Truth(NamedTuple):
    """A volume as another library reads it.

    Attributes:
        voxels: (i, j, k) or (i, j, k, C).
        affine: (4, 4) to mm in RAS.
    """

    voxels: Array
    affine: NDArray[np.float64]


@dataclass(frozen=True)
class Volume:
    """A way in which a volume may be stored.

    Attributes:
        make: Writes it below a folder, and returns the path that a user names, or None for the
            folder.
        truth: Reads it without medfed.
        refused: The words of the sentence that refuses it; empty for what is read.
        line: The words of a line that is said when it is read.
        taken: Files that belong to it; None is not asked.
    """

    make: Callable[[Path], Path | None]
    truth: Callable[[Path], Truth] | None = None
    refused: str = ""
    line: str = ""
    taken: int | None = None


def noise(shape: Sequence[int] = SHAPE, top: int = 900, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(1, top, shape).astype(np.int16)


def straight(spacing: Sequence[float] = SPACING) -> NDArray[np.float64]:
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = 10, -20, 30
    return affine


def turned(*degrees: float) -> NDArray[np.float64]:
    """An affine turned about the three axes."""
    affine = straight()
    for axis, degree in enumerate(degrees):
        c, s = np.cos(np.radians(degree)), np.sin(np.radians(degree))
        turn, (i, j) = np.eye(4), [n for n in range(3) if n != axis]
        turn[i, i], turn[i, j], turn[j, i], turn[j, j] = c, -s, s, c
        affine = turn @ affine
    return affine


def by_nibabel(unit: float = 1.0) -> Callable[[Path], Truth]:
    def read(path: Path) -> Truth:
        image: Any = nib.load(path)
        scale = np.diag([unit, unit, unit, 1.0])
        return Truth(np.asanyarray(image.dataobj), scale @ image.affine)

    return read


def by_sitk(path: Path) -> Truth:
    image = sitk.ReadImage(str(path))
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    array = sitk.GetArrayFromImage(image)
    return Truth(array.transpose(2, 1, 0, *range(3, array.ndim)), LPS @ affine)


def known(voxels: Array, affine: NDArray[np.float64]) -> Callable[[Path], Truth]:
    """What was written, where no library here reads it."""
    return lambda path: Truth(voxels, affine)


# NIfTI


def nifti(
    array: Array | None = None,
    affine: NDArray[np.float64] | None = None,
    name: str = "a.nii.gz",
    change: Callable[[Any], object] = lambda image: None,
    kind: Any = nib.Nifti1Image,
    **more: Any,
) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        voxels = noise() if array is None else array
        image = kind(voxels, straight() if affine is None else affine, dtype=voxels.dtype)
        content = image.to_bytes()
        header = type(image.header).from_fileobj(io.BytesIO(content))
        for key, value in more.items():
            header[key] = value
        change(header)  # nibabel would make the forms of an image agree
        content = header.binaryblock + content[len(header.binaryblock) :]
        (folder / name).write_bytes(
            gzip.compress(content, 1) if name.lower().endswith("gz") else content
        )
        return folder / name

    return make


def unit(name: str | int) -> Callable[[Any], object]:
    return lambda header: header.set_xyzt_units(name)


def forms(sform: Any, qform: Any, codes: Sequence[int]) -> Callable[[Any], object]:
    def change(header: Any) -> None:
        header.set_sform(sform, codes[0])
        header.set_qform(qform, codes[1])

    return change


def big_endian(folder: Path) -> Path:
    header = nib.Nifti1Header(endianness=">")
    header.set_data_dtype(">i2")
    image = nib.Nifti1Image(noise().astype(">i2"), straight(), header)
    nib.save(image, folder / "a.nii")
    assert (folder / "a.nii").read_bytes()[:4] == b"\0\0\x01\x5c"
    return folder / "a.nii"


def scaled(slope: float, intercept: float) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = nifti(name="a.nii")(folder)
        content = bytearray(path.read_bytes())
        content[112:120] = struct.pack("<ff", slope, intercept)
        path.write_bytes(content)
        return path

    return make


def pair(kind: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        nib.save(kind(noise(), straight()), folder / "a.img")
        return folder / "a.hdr"

    return make


def damaged(change: Callable[[bytes], bytes], name: str = "a.nii.gz") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = nifti(name=name)(folder)
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def colours(folder: Path) -> Path:
    array = np.zeros(SHAPE, dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    nib.save(nib.Nifti1Image(array, straight()), folder / "a.nii.gz")
    return folder / "a.nii.gz"


def offset(start: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = nifti(name="a.nii")(folder)
        content = bytearray(path.read_bytes())
        content[108:112] = struct.pack("<f", start)
        path.write_bytes(content + bytes(max(start - 352, 0)))
        return path

    return make


def type_code(code: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = nifti(name="a.nii")(folder)
        content = bytearray(path.read_bytes())
        content[70:72] = struct.pack("<h", code)
        path.write_bytes(content)
        return path

    return make


WITH_NAN = noise().astype(np.float32)
WITH_NAN[1, 2, 3], WITH_NAN[3, 2, 1] = np.nan, np.inf
OTHER = straight((1.0, 1.5, 4.0))
CORRUPT = r"is truncated or corrupt \(.+\); copy it again"

NIFTI = {
    "mm": Volume(nifti(change=unit("mm")), by_nibabel()),
    "micron": Volume(nifti(affine=straight((500, 750, 2000)), change=unit("micron")),
                     by_nibabel(1e-3)),
    "metre": Volume(nifti(affine=straight((5e-4, 75e-5, 2e-3)), change=unit("meter")),
                    by_nibabel(1e3)),
    "no unit": Volume(nifti(change=unit(0)), by_nibabel()),
    "unit unknown": Volume(nifti(xyzt_units=7), by_nibabel()),
    "qform alone": Volume(nifti(change=forms(OTHER, straight(), (0, 1))), by_nibabel()),
    "sform alone": Volume(nifti(change=forms(straight(), OTHER, (1, 0))), by_nibabel()),
    "qform and sform differ": Volume(nifti(change=forms(straight(), OTHER, (1, 1))), by_nibabel(),
                                     line="a sform and a qform that differ"),
    "neither form": Volume(nifti(change=forms(straight(), straight(), (0, 0))), by_nibabel(),
                           line="does not say which side is left"),
    "4-D of one": Volume(nifti(noise((*SHAPE, 1))), by_nibabel()),
    "5-D of ones": Volume(nifti(noise((*SHAPE, 1, 1))), refused="a volume has three axes"),
    "five volumes": Volume(nifti(noise((*SHAPE, 5))), by_nibabel()),
    "a vector per voxel": Volume(nifti(noise((*SHAPE, 1, 3))), refused="a volume has three axes"),
    "one slice": Volume(nifti(noise((6, 5, 1))), by_nibabel()),
    "2-D": Volume(nifti(noise((6, 5))), refused="a volume has three axes"),
    ".NII.GZ": Volume(nifti(name="A.NII.GZ"), by_nibabel()),
    ".Nii": Volume(nifti(name="A.Nii"), refused=r"name it a\.nii"),
    "packed, called .nii": Volume(damaged(lambda b: gzip.compress(b, 1), "a.nii"),
                                  refused="is a gzip file"),
    "plain, called .nii.gz": Volume(damaged(gzip.decompress), refused="a NIfTI file that is not"),
    "packed twice": Volume(damaged(lambda b: gzip.compress(b, 1)), refused="is a gzip file in a"),
    "packed PNG": Volume(damaged(lambda b: gzip.compress(b"\x89PNG\r\n\x1a\n" + b)),
                         refused="is a PNG picture in a gzip file"),
    "two members of gzip": Volume(
        damaged(lambda b: gzip.compress(gzip.decompress(b)[:300]) +
                gzip.compress(gzip.decompress(b)[300:])), by_nibabel()),
    "PNG": Volume(damaged(lambda b: b"\x89PNG\r\n\x1a\n" + b), refused="is a PNG picture"),
    "web page": Volume(damaged(lambda b: b"<!DOCTYPE html><html>"), refused="is a web page"),
    "pointer of Git LFS": Volume(damaged(lambda b: b"version https://git-lfs.github.com/spec/v1\n"),
                                 refused="is a pointer of Git LFS"),
    "RGB": Volume(colours, refused="voxels of type"),
    "complex": Volume(nifti(noise().astype(np.complex64)), refused="voxels of type complex64"),
    "slope": Volume(scaled(0.5, -3), by_nibabel()),
    "negative slope": Volume(scaled(-0.5, 3), by_nibabel()),
    "slope of 0": Volume(scaled(0, 7), by_nibabel()),
    "slope NaN": Volume(scaled(np.nan, np.nan), by_nibabel()),
    "int8": Volume(nifti((noise() % 100).astype(np.int8)), by_nibabel()),
    "uint16": Volume(nifti(noise().astype(np.uint16) + np.uint16(40000)), by_nibabel()),
    "int64": Volume(nifti(noise().astype(np.int64)), by_nibabel()),
    "float64": Volume(nifti(noise() / 7), by_nibabel()),
    "float of 128 bits": Volume(type_code(1536), refused="a bad header"),
    "type of 16-bit floats": Volume(type_code(16384), refused="a bad header"),
    "big endian": Volume(big_endian, by_nibabel()),
    "axes L P I": Volume(nifti(affine=straight() @ np.diag([-1, -1, -1, 1])), by_nibabel()),
    "axes S L A": Volume(nifti(affine=straight()[:, [1, 2, 0, 3]]), by_nibabel()),
    "oblique": Volume(nifti(affine=turned(10, -20, 30)), by_nibabel()),
    "sheared": Volume(nifti(affine=straight() @ (np.eye(4) + np.diag([0.3, 0, 0], 1))),
                      refused="is sheared"),
    "affine of zeros": Volume(nifti(change=forms(np.diag([0, 0, 0, 1]), None, (1, 0))),
                              refused="no valid affine"),
    "NIfTI-2": Volume(nifti(kind=nib.Nifti2Image), by_nibabel()),
    "voxels in the header": Volume(offset(0), refused="the voxels begin within it"),
    "voxels behind a gap": Volume(offset(368), by_nibabel()),
    "pair .hdr, .img": Volume(pair(nib.Nifti1Pair), by_nibabel(), taken=2),
    "Analyze": Volume(pair(nib.AnalyzeImage), by_nibabel(), taken=2,
                      line="does not say which side is left"),
    "empty": Volume(damaged(lambda b: b""), refused=CORRUPT),
    "truncated": Volume(damaged(lambda b: b[:-20]), refused=CORRUPT),
    "flipped bit": Volume(damaged(lambda b: b[:-6] + bytes([b[-6] ^ 1]) + b[-5:]), refused=CORRUPT),
    "plain, truncated": Volume(damaged(lambda b: gzip.decompress(b)[:-9], "a.nii.gz"),
                               refused="a NIfTI file that is not packed"),
    "NaN and infinity": Volume(nifti(WITH_NAN), refused="has NaN or infinite voxels"),
    "missing": Volume(lambda folder: folder / "b.nii.gz", refused="is missing"),
}  # fmt: skip


# NRRD and MetaImage

SPACES = {  # signs of the axes towards right, front and head
    "left-posterior-superior": (-1, -1, 1),
    "LPS": (-1, -1, 1),
    "right-anterior-superior": (1, 1, 1),
    "RAS": (1, 1, 1),
    "left-anterior-superior": (-1, 1, 1),
}


def nrrd(
    array: Array | None = None,
    space: str | None = "left-posterior-superior",
    encoding: str = "raw",
    extra: Sequence[str] = (),
    spacings: bool = False,
    name: str = "a.nrrd",
    end: str = "\n",
    **changed: str,
) -> Callable[[Path], Path]:
    """Writes a file by hand, as ITK writes few of its forms."""
    array = noise() if array is None else array

    def make(folder: Path) -> Path:
        order = "big" if array.dtype.byteorder == ">" else "little"
        types = {"i2": "short", "u1": "uchar", "f4": "float", "f8": "double", "i8": "int64"}
        lists = array.ndim - 3
        fields = {
            "type": types[array.dtype.str[1:]],
            "dimension": str(array.ndim),
            **({"space": space} if space else {}),
            **{key.replace("_", " "): value for key, value in changed.items() if "dim" in key},
            "sizes": " ".join(map(str, array.shape)),
            **(
                {"spacings": " ".join([*["nan"] * lists, *map(str, SPACING)])}
                if spacings
                else {
                    "space directions": " ".join(
                        [*["none"] * lists]
                        + [f"({','.join(map(str, row))})" for row in np.diag(SPACING)]
                    ),
                    "space origin": "(10,-20,30)",
                }
            ),
            "endian": order,
            "encoding": encoding,
            **{key.replace("_", " "): value for key, value in changed.items()},
        }
        head = ["NRRD0004", "# a comment", *(f"{k}: {v}" for k, v in fields.items()), *extra]
        content = array.tobytes("F")
        if encoding in ("gzip", "gz"):
            content = gzip.compress(content, 1)
        elif encoding in ("ascii", "text", "txt"):
            content = " ".join(map(str, array.ravel("F"))).encode()
        elif encoding == "hex":
            content = content.hex().encode()
        elif encoding == "bzip2":
            import bz2

            content = bz2.compress(content)
        text = end.join(head).encode() + end.encode()
        if name.endswith(".nhdr"):
            (folder / "a.raw").write_bytes(content)
            (folder / name).write_bytes(text + b"data file: a.raw\n")
        else:
            (folder / name).write_bytes(text + end.encode() + content)
        return folder / name

    return make


def written(
    array: Array | None = None,
    signs: Sequence[int] = (-1, -1, 1),
    unit: float = 1.0,
    first: int = 0,
) -> Callable[[Path], Truth]:
    """What `nrrd` wrote."""
    array = noise() if array is None else array
    affine = np.diag([*signs, 1.0]) @ straight()
    affine[:3] *= unit
    return known(np.moveaxis(array, 0, -1) if first else array, affine)


UNITS = '"um" "um" "um"'
NRRD = {
    "raw": Volume(nrrd(), by_sitk),
    "gzip": Volume(nrrd(encoding="gzip"), by_sitk),
    "ascii": Volume(nrrd(encoding="ascii"), written()),
    "hex": Volume(nrrd(encoding="hex"), written()),
    "bzip2": Volume(nrrd(encoding="bzip2"), refused="must be raw, ascii, hex or gzip"),
    "microns": Volume(nrrd(space_units=UNITS), written(unit=1e-3)),
    "units differ": Volume(nrrd(space_units='"mm" "mm" "um"'), refused="space units"),
    "detached": Volume(nrrd(name="a.nhdr"), refused=r"one \.nrrd file"),
    "data file": Volume(nrrd(extra=["data file: a.raw"]), refused=r"one \.nrrd file"),
    **{f"space {name}": Volume(nrrd(space=name), written(signs=signs))
       for name, signs in SPACES.items()},
    "no space": Volume(nrrd(space=None, spacings=True), by_sitk,
                       line="does not say which side is left"),
    "space of three axes": Volume(nrrd(space=None, space_dimension="3"), by_sitk,
                                  line="does not say which side is left"),
    "scanner-xyz": Volume(nrrd(space="scanner-xyz"), by_sitk,
                          line="does not say which side is left"),
    "colour first": Volume(nrrd(noise((3, *SHAPE)), kinds="vector domain domain domain"),
                           written(noise((3, *SHAPE)), first=1)),
    "four axes": Volume(nrrd(noise((*SHAPE, 2)), space="scanner-xyz-time", space_directions=(
        "(0.5,0,0,0) (0,0.75,0,0) (0,0,2,0) (0,0,0,1)"), space_origin="(0,0,0,0)"),
        refused="but not three space directions"),
    "big endian": Volume(nrrd(noise().astype(">i2")), written()),
    "float": Volume(nrrd((noise() / 8).astype("f4")), written((noise() / 8).astype("f4"))),
    "int64": Volume(nrrd(noise().astype("i8")), written()),
    "lines of Windows": Volume(nrrd(end="\r\n"), by_sitk),
    "no directions": Volume(nrrd(spacings=True), refused="but not three space directions"),
    "more bytes": Volume(nrrd(sizes="6 3 4"), refused="has 240 bytes, but a.nrrd says 144"),
    "too few bytes": Volume(nrrd(sizes="6 5 40"), refused="has 240 bytes, but a.nrrd says 2400"),
    "PNG": Volume(damaged(lambda b: b"\x89PNG\r\n\x1a\n" + b, "a.nrrd"), refused="a PNG picture"),
    "empty": Volume(damaged(lambda b: b"", "a.nrrd"), refused=CORRUPT),
}  # fmt: skip


def metaimage(
    array: Array | None = None,
    name: str = "a.mha",
    packed: bool = False,
    change: Callable[[bytes], bytes] = lambda head: head,
) -> Callable[[Path], Path]:
    array = noise() if array is None else array

    def make(folder: Path) -> Path:
        vector = array.ndim == 4
        image = sitk.GetImageFromArray(
            array.transpose(2, 1, 0, *range(3, array.ndim)), isVector=vector
        )
        image.SetSpacing(SPACING)
        image.SetOrigin((10, -20, 30))
        sitk.WriteImage(image, str(folder / name), packed)
        head, mark, rest = (folder / name).read_bytes().partition(b"ElementDataFile")
        (folder / name).write_bytes(change(head) + mark + rest)
        return folder / name

    return make


def renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(head: bytes) -> bytes:
        assert old in head, head
        return head.replace(old, new, 1)

    return change


def spacing_only(folder: Path) -> Path:
    (folder / "a.raw").write_bytes(noise().tobytes("F"))
    lines = ["ObjectType = Image", "NDims = 3", "DimSize = 6 5 4", "ElementSpacing = 0.5 0.75 2"]
    text = "\n".join([*lines, "ElementType = MET_SHORT", "ElementDataFile = a.raw", ""])
    (folder / "a.mhd").write_text(text)
    return folder / "a.mhd"


def size_only(folder: Path) -> Path:
    path = spacing_only(folder)
    path.write_text(path.read_text().replace("ElementSpacing", "ElementSize"))
    return path


def without_voxels(folder: Path) -> Path:
    path = metaimage(name="a.mhd")(folder)
    (folder / "a.raw").unlink()
    return path


def behind_a_header(folder: Path) -> Path:
    path = spacing_only(folder)
    raw = folder / "a.raw"
    raw.write_bytes(b"x" * 77 + raw.read_bytes())
    path.write_text(path.read_text().replace("ElementDataFile", "HeaderSize = -1\nElementDataFile"))
    return path


def msb(folder: Path) -> Path:
    path = spacing_only(folder)
    (folder / "a.raw").write_bytes(noise().astype(">i2").tobytes("F"))
    path.write_text(
        path.read_text().replace("ElementType", "BinaryDataByteOrderMSB = True\nElementType")
    )
    return path


PIECES = "in several files"
METAIMAGE = {
    "one file": Volume(metaimage(), by_sitk, taken=1),
    "packed": Volume(metaimage(packed=True), by_sitk, taken=1),
    "detached": Volume(metaimage(name="a.mhd"), by_sitk, taken=2),
    "detached, packed": Volume(metaimage(name="a.mhd", packed=True), by_sitk, taken=2),
    "ElementSpacing alone": Volume(spacing_only, known(noise(), np.diag([-0.5, -0.75, 2, 1]))),
    "ElementSize alone": Volume(size_only, by_sitk),
    "no spacing": Volume(metaimage(change=renamed(b"ElementSpacing = 0.5 0.75 2\n", b"")), by_sitk,
                         line="does not say the size of its voxels"),
    "behind a header": Volume(behind_a_header, known(noise(), np.diag([-0.5, -0.75, 2, 1]))),
    "big endian": Volume(msb, known(noise(), np.diag([-0.5, -0.75, 2, 1]))),
    "float": Volume(metaimage((noise() / 8).astype("f4")), by_sitk),
    "double": Volume(metaimage(noise() / 7), by_sitk),
    "unsigned bytes": Volume(metaimage((noise() % 200).astype("u1")), by_sitk),
    "int64": Volume(metaimage(noise().astype("i8")), by_sitk),
    "three values": Volume(metaimage(noise((*SHAPE, 3))), by_sitk),
    "four axes": Volume(metaimage(change=renamed(b"NDims = 3", b"NDims = 4")),
                        refused="has NDims = '4', which must be 3"),
    "turned": Volume(metaimage(change=renamed(b"1 0 0 0 1 0 0 0 1", b"0 1 0 -1 0 0 0 0 1")),
                     by_sitk),
    "text": Volume(metaimage(change=renamed(b"BinaryData = True", b"BinaryData = False")),
                   refused="voxels written as text are not read"),
    "no voxels": Volume(without_voxels, refused=r"a\.raw is missing, but a\.mhd names it"),
    "cut": Volume(damaged(lambda b: b"ObjectType = Image\nNDims = 3\n", "a.mha"),
                  refused="is no MetaImage header; copy it again"),
    "empty": Volume(damaged(lambda b: b"", "a.mha"), refused="copy it again"),
}  # fmt: skip


# DICOM


def by_pydicom(folder: Path) -> Truth:
    """The slices of a folder by where they lie."""
    kind = "Image Storage"
    every = [pydicom.dcmread(f, force=True) for f in sorted(folder.iterdir()) if f.is_file()]
    for one in every:
        if "TransferSyntaxUID" not in one.file_meta:  # no preamble
            one.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    names = [uid.UID(str(d.get("SOPClassUID") or "1.2")).name for d in every]
    slices = [d for d, name in zip(every, names, strict=True) if kind in name or name[:2] == "1."]
    slices = [d for d in slices if "Rows" in d]  # no list of files
    if len(slices) == 1:
        return _by_frames(slices[0])
    across = np.reshape([float(x) for x in slices[0].ImageOrientationPatient], (2, 3))
    normal = np.cross(*across)
    slices.sort(key=lambda d: float(normal @ np.array(d.ImagePositionPatient, float)))
    voxels = np.stack([_values(d, d.pixel_array) for d in slices]).transpose(2, 1, 0)
    ends = [np.array(d.ImagePositionPatient, float) for d in (slices[0], slices[-1])]
    affine = np.eye(4)
    affine[:3, 0] = across[0] * float(slices[0].PixelSpacing[1])
    affine[:3, 1] = across[1] * float(slices[0].PixelSpacing[0])
    affine[:3, 2], affine[:3, 3] = (ends[1] - ends[0]) / (len(slices) - 1), ends[0]
    return Truth(voxels, LPS @ affine)


def _values(of: Any, pixels: Array) -> Array:
    values = pixels.astype(float) * float(of.get("RescaleSlope", 1))
    return values + float(of.get("RescaleIntercept", 0))


def _by_frames(of: Any) -> Truth:
    shared = of.SharedFunctionalGroupsSequence[0]
    scale = shared.PixelValueTransformationSequence[0]
    places = [
        np.array(f.PlanePositionSequence[0].ImagePositionPatient, float)
        for f in of.PerFrameFunctionalGroupsSequence
    ]
    order = np.argsort([p[2] for p in places])
    voxels = _values(scale, of.pixel_array[order]).transpose(2, 1, 0)
    steps = shared.PixelMeasuresSequence[0].PixelSpacing
    affine = np.diag(
        [float(steps[1]), float(steps[0]), places[order[1]][2] - places[order[0]][2], 1]
    )
    affine[:3, 3] = places[order[0]]
    return Truth(voxels, LPS @ affine)


def slices(
    change: Callable[[Any, int], object] = lambda one, k: None,
    names: str = "{}.dcm",
    after: Callable[[Path], object] = lambda folder: None,
    heights: Sequence[float] = (0.0, 2.0, 4.0, 6.0),
    **settings: Any,
) -> Callable[[Path], None]:
    """A series of which each slice is changed before it is saved."""

    def make(folder: Path) -> None:
        pixels = noise((len(heights), 8, 6)).astype(np.uint16)
        syntax = settings.get("syntax", uid.ExplicitVRLittleEndian)
        for k, height in enumerate(heights):
            one = plain(pixels, k, height, **settings)
            change(one, k)
            save(one, folder / names.format(k), "bare" in names, syntax)
        after(folder)

    return make


def put(**elements: Any) -> Callable[[Any, int], object]:
    """Sets elements of every slice, or deletes those that are None."""

    def change(one: Any, k: int) -> None:
        for name, value in elements.items():
            if value is None:
                delattr(one, name)
            else:
                setattr(one, name, value)

    return change


def pixels_of(
    dtype: str, top: int, bits: int, signed: int = 0, lowest: int = 0
) -> Callable[[Any, int], object]:
    def change(one: Any, k: int) -> None:
        values = np.random.default_rng(k).integers(lowest, top, (8, 6)).astype(dtype)
        one.PixelData = values.tobytes()
        one.BitsAllocated = values.itemsize * 8
        one.BitsStored, one.HighBit, one.PixelRepresentation = bits, bits - 1, signed

    return change


def first(change: Callable[[Any, int], object], which: int = 1) -> Callable[[Any, int], object]:
    """Changes one slice alone."""
    return lambda one, k: change(one, k) if k == which else None


def compressed(syntax: Any, encode: Callable[[Array], bytes] | None = None, top: int = 900) -> Any:
    """Compresses by a library, or by a codec of Pillow's."""

    def change(one: Any, k: int) -> None:
        pixels = np.random.default_rng(k).integers(0, top, (16, 16)).astype(np.uint16)
        pixels = np.sort(pixels.ravel()).reshape(16, 16)  # smooth, as lossy codecs like it
        one.Rows = one.Columns = 16
        if top <= 256:
            pixels = pixels.astype(np.uint8)
            one.BitsAllocated, one.BitsStored, one.HighBit = 8, 8, 7
        one.PixelData = pixels.tobytes()
        if encode is None:
            one.compress(syntax)
        else:
            one.PixelData = encapsulate([encode(pixels)])
            one["PixelData"].is_undefined_length = True
        one.file_meta.TransferSyntaxUID = syntax

    return change


def by_pillow(kind: str, **options: Any) -> Callable[[Array], bytes]:
    def encode(pixels: Array) -> bytes:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind, **options)
        return out.getvalue()

    return encode


def by_gdcm(folder: Path) -> None:
    """Slices that GDCM compresses, as no other library here does."""
    slices(put(RescaleSlope=None, RescaleIntercept=None))(folder)
    writer = sitk.ImageFileWriter()
    writer.SetImageIO("GDCMImageIO")
    writer.KeepOriginalImageUIDOn()
    writer.UseCompressionOn()
    writer.SetCompressor("JPEG")
    with unchanged_locale():
        for file in sorted(folder.iterdir()):
            image = sitk.Cast(sitk.ReadImage(str(file)), sitk.sitkUInt16)
            for key in ("0028|1052", "0028|1053", "0002|0010"):
                image.EraseMetaData(key)
            for key, value in (("0020|000d", "1.2.3"), ("0020|000e", "1.2.4")):
                image.SetMetaData(key, value)
            writer.SetFileName(str(file))
            writer.Execute(image)
            assert pydicom.dcmread(file).file_meta.TransferSyntaxUID == uid.JPEGLosslessSV1


def foreign(*kinds: str) -> Callable[[Path], object]:
    """Puts other objects beside the slices."""

    def after(folder: Path) -> None:
        for kind in kinds:
            one = base(uid.UID(f"1.2.840.10008.5.1.4.1.1.{kind}"), noise((8, 6)), series="9")
            for tag in ("PixelData", "Rows", "Columns"):
                delattr(one, tag)
            save(one, folder / f"{kind}.dcm")
        frames(folder / "seg.dcm", kind=SEG, series="2")
        (folder / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
        (folder / ".DS_Store").write_bytes(b"x")

    return after


def in_the_folder(make: Callable[[Path], object]) -> Callable[[Path], Path | None]:
    """Gives a file of frames its name."""
    return lambda folder: (make(folder / "a.dcm"), None)[1]


def item(**values: Any) -> Dataset:
    one = Dataset()
    for name, value in values.items():
        setattr(one, name, value)
    return one


def looked_up(one: Any, k: int) -> None:
    del one.RescaleSlope, one.RescaleIntercept
    table = item(ModalityLUTType="HU", LUTData=np.arange(0, 2000, 2, dtype="<u2").tobytes())
    table.add_new("LUTDescriptor", "US", [1000, 0, 16])
    one.ModalityLUTSequence = [table]


def inverted(folder: Path) -> Truth:
    truth = by_pydicom(folder)
    return Truth(65535 - 1024 - (truth.voxels + 1024), truth.affine)


def one_inverted(folder: Path) -> Truth:
    truth, all_inverted = by_pydicom(folder), inverted(folder)
    return Truth(np.where(np.arange(4) == 1, all_inverted.voxels, truth.voxels), truth.affine)


def coloured(one: Any, k: int) -> None:
    one.SamplesPerPixel, one.PhotometricInterpretation, one.PlanarConfiguration = 3, "RGB", 0
    one.BitsAllocated, one.BitsStored, one.HighBit = 8, 8, 7
    one.PixelData = bytes(8 * 6 * 3)


def of_another_size(one: Any, k: int) -> None:
    one.Rows, one.PixelData = 4, bytes(4 * 6 * 2)


def scout(folder: Path) -> None:
    one = plain(noise((4, 8, 6)).astype(np.uint16), 0, 0.0)
    one.ImageOrientationPatient = [0, 1, 0, 0, 0, -1]
    save(one, folder / "scout.dcm")


def copied(folder: Path) -> None:
    (folder / "copy.dcm").write_bytes((folder / "1.dcm").read_bytes())


def unknown(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes().replace(b"1.2.4.201", b"1.2.4.299"))


def cut(folder: Path) -> None:
    path = folder / "2.dcm"
    path.write_bytes(path.read_bytes()[:-40])


def emptied(folder: Path) -> None:
    (folder / "2.dcm").write_bytes(b"")


UNLIKE = "has another size, spacing or direction"
PLACE = ("PixelSpacing", "ImageOrientationPatient", "ImagePositionPatient")
ORDER = ([2, 0, 6, 4], [6, 4, 2, 0])
DICOM = {
    "slices": Volume(slices(), by_pydicom, taken=4),
    "implicit": Volume(slices(syntax=uid.ImplicitVRLittleEndian), by_pydicom, taken=4),
    "no preamble": Volume(lambda f: (series(f, bare=(0, 1, 2, 3, 4)), None)[1], by_pydicom,
                          taken=5),
    "no ending": Volume(slices(names="1.2.840.{}"), by_pydicom, taken=4),
    ".IMA": Volume(slices(names="{}.IMA"), by_pydicom, taken=4),
    "shuffled names": Volume(slices(heights=[4, 0, 6, 2]), by_pydicom, taken=4),
    "oblique": Volume(slices(put(ImageOrientationPatient=[0.8, 0.6, 0, -0.6, 0.8, 0])), by_pydicom),
    "sheets from the front": Volume(slices(lambda one, k: put(
        ImageOrientationPatient=[1, 0, 0, 0, 0, -1], ImagePositionPatient=[0, 2.0 * k, 0])(one, k)),
        by_pydicom),
    "signed": Volume(slices(pixels_of("i2", 900, 16, 1, -900)), by_pydicom),
    "12 bits of 16": Volume(slices(pixels_of("u2", 4096, 12)), by_pydicom),
    "12 bits of 16, signed": Volume(slices(pixels_of("i2", 2048, 12, 1, -2048)), by_pydicom),
    "8 bits": Volume(slices(pixels_of("u1", 256, 8)), by_pydicom),
    "32 bits": Volume(slices(pixels_of("u4", 900, 32)), by_pydicom),
    "slope per slice": Volume(slices(lambda one, k: put(RescaleSlope=k + 1)(one, k)), by_pydicom),
    "broken slope": Volume(slices(put(RescaleSlope="0.123456", RescaleIntercept="-0.5")),
                           by_pydicom),
    "no slope": Volume(slices(put(RescaleSlope=None, RescaleIntercept=None)), by_pydicom),
    "slope of 0": Volume(slices(put(RescaleSlope=0)), refused="no usable RescaleSlope"),
    "look-up table": Volume(slices(looked_up), refused="look-up table"),
    "MONOCHROME1": Volume(slices(put(PhotometricInterpretation="MONOCHROME1")), inverted,
                          line="MONOCHROME1"),
    "MONOCHROME1 in one": Volume(slices(first(put(PhotometricInterpretation="MONOCHROME1"))),
                                 one_inverted, line="1 of 4 images store white as 0"),
    "deflated": Volume(slices(put(), syntax=uid.DeflatedExplicitVRLittleEndian), by_pydicom),
    "RLE": Volume(slices(compressed(uid.RLELossless)), by_pydicom),
    "JPEG-LS": Volume(slices(compressed(uid.JPEGLSLossless)), by_pydicom),
    "JPEG baseline": Volume(slices(compressed(uid.JPEGBaseline8Bit, by_pillow("JPEG"), 256)),
                            by_pydicom),
    "JPEG 2000": Volume(slices(compressed(uid.JPEG2000Lossless, by_pillow(
        "JPEG2000", irreversible=False, no_jp2=True))), by_pydicom),
    "JPEG lossless": Volume(by_gdcm, known(
        noise((4, 8, 6)).transpose(2, 1, 0), LPS @ np.diag([0.7, 0.8, 2, 1]))),
    "HTJ2K": Volume(slices(compressed(uid.HTJ2KLossless, lambda p: b"12")),
                    refused="is compressed as High-Throughput JPEG 2000"),
    "MPEG": Volume(slices(compressed(uid.MPEG2MPML, lambda p: b"12")),
                   refused="is compressed as MPEG2"),
    "unknown syntax": Volume(slices(compressed(uid.HTJ2KLossless, lambda p: b"12"), after=unknown),
                             refused=r"is compressed as 1\.2\.840\.10008\.1\.2\.4\.299"),
    "frames": Volume(in_the_folder(frames), by_pydicom, taken=1),
    "frames, shuffled": Volume(in_the_folder(lambda p: frames(p, ORDER[0])), by_pydicom),
    "frames, from above": Volume(in_the_folder(lambda p: frames(p, ORDER[1])), by_pydicom),
    "frames, uneven": Volume(in_the_folder(lambda p: frames(p, [0, 2, 4, 6.6, 8.6])),
                             refused="the distance is uneven"),
    "frames, one missing": Volume(in_the_folder(lambda p: frames(p, [0, 2, 4, 8, 10])),
                                  refused="a slice is missing"),
    "frames, slopes": Volume(in_the_folder(lambda p: frames(p, slopes=[1, 2, 3, 4, 5])),
                             refused="5 different slopes"),
    "frames, no places": Volume(in_the_folder(lambda p: frames(p, shared=False)),
                                refused="says of 0 where they lie"),
    "two of frames": Volume(lambda f: (frames(f / "a.dcm"), frames(f / "b.dcm"), None)[2],
                            refused="keep one volume per folder"),
    "one missing": Volume(slices(heights=[0, 2, 4, 8, 10]), refused="a slice is missing between"),
    "two series": Volume(slices(first(put(SeriesInstanceUID="1.2.3"))), refused="holds 2 DICOM"),
    "two phases": Volume(slices(heights=[0, 2, 4, 6, 0, 2, 4, 6]), refused="several phases"),
    "two spacings": Volume(slices(heights=[0, 1, 2, 3, 4, 9, 14, 19, 24]), refused="two spacings"),
    "two pixel spacings": Volume(slices(first(put(PixelSpacing=[1, 1]))), refused=UNLIKE),
    "two sizes": Volume(slices(first(of_another_size)), refused=UNLIKE),
    "a scout": Volume(slices(after=scout), refused=UNLIKE),
    "a slice twice": Volume(slices(after=copied), refused="keep each slice once"),
    "a slice beside the others": Volume(slices(first(put(ImagePositionPatient=[1, 0, 2]))),
                                        refused=r"1\.dcm lies beside the other slices"),
    "tilted gantry": Volume(slices(lambda one, k: put(
        ImagePositionPatient=[0, 0.6 * k, 2.0 * k])(one, k)), refused="gantry tilted by 16.7"),
    "colours": Volume(slices(coloured), refused="colour images"),
    "other objects beside": Volume(slices(after=foreign("481.3", "88.33", "104.1")), by_pydicom,
                                   taken=4),
    "only a mask": Volume(in_the_folder(lambda p: frames(p, kind=SEG)),
                          refused="no DICOM images but Segmentation"),
    "one slice": Volume(slices(heights=[0]), refused="a single slice"),
    **{f"no {name}": Volume(slices(put(**{name: None})), refused=f"no usable {name}, without")
       for name in PLACE},
    "too few voxels": Volume(slices(first(put(PixelData=b"0" * 40))), refused=CORRUPT),
    "too many rows": Volume(slices(put(Rows=800)), refused=r"less than expected \(96 vs 9600"),
    "too few rows": Volume(slices(put(Rows=2)), refused="4 frames, instead of 1"),
    "bits that contradict": Volume(slices(put(BitsAllocated=8)), refused="'Bits Stored' value"),
    "cut": Volume(slices(after=cut), refused=r"2\.dcm is truncated or corrupt"),
    "an empty file": Volume(slices(after=emptied), refused=r"2\.dcm is truncated or corrupt"),
    "a folder of notes": Volume(lambda f: ((f / "notes.txt").write_text("x"), None)[1],
                                refused="holds no DICOM files"),
}  # fmt: skip

VOLUMES = {
    f"{kind}: {name}": volume
    for kind, rows in (("NIfTI", NIFTI), ("NRRD", NRRD), ("MetaImage", METAIMAGE), ("DICOM", DICOM))
    for name, volume in rows.items()
}
