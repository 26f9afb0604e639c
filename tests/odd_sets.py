"""Pictures, arrays, tables, names and lists in every shape that others give them.

Each `Set` makes its files, and says what medfed reads, what another library reads, or in which
words medfed must refuse it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import SimpleITK as sitk
from numpy.typing import NDArray
from PIL import Image, ImageOps

from medfed.config.compose import build, described
from medfed.datamodules.plans import by_id
from medfed.datamodules.readers.case_folders import FolderReader
from medfed.datamodules.readers.datalist import DatalistReader, MSDReader, NnunetReader
from medfed.datamodules.readers.image_folder import read_image_folder, read_image_table
from medfed.datamodules.readers.image_masks import ImageMasksReader
from medfed.datamodules.readers.luna16 import Luna16Reader
from medfed.datamodules.readers.medmnist import read_medmnist
from medfed.datamodules.readers.table import read_csv
from medfed.standalone.pictures import read_mask, read_picture
from tests.odd_volumes import noise, straight

Array = NDArray[Any]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Set:
    """A way in which a data set may be stored.

    Attributes:
        make: Writes it below a folder, and returns the path that a user names.
        read: What medfed reads, by check.
        truth: What was written, or another library reads, by check; None for what is refused.
        refused: The words of the sentence that refuses it.
        line: The words of a line that is said when it is read.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Facts]
    truth: Callable[[Path], Facts] | None = None
    refused: str = ""
    line: str = ""


# Pictures

SIZE = (12, 16)
Save = Callable[[Path, int], object]


def grey(n: int = 0, top: int = 256, dtype: str = "u1") -> Array:
    return np.random.default_rng(n).integers(0, top, SIZE).astype(dtype)


def saved(ending: str = "png", of: Callable[[int], Image.Image] | None = None, **how: Any) -> Save:
    def save(path: Path, n: int) -> None:
        image = Image.fromarray(grey(n)) if of is None else of(n)
        image.save(path.with_suffix(f".{ending}"), **how)

    return save


def classes(
    save: Save, after: Callable[[Path], object] = lambda folder: None
) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for at, kind in enumerate(("ill", "well")):
            (folder / kind).mkdir(parents=True)
            for n in range(3):
                save(folder / kind / f"p{n}", 10 * at + n)
        after(folder)
        return folder

    return make


def pictures(color: str = "grey") -> Callable[[Path], Facts]:
    def read(path: Path) -> Facts:
        found = read_image_folder(path, SIZE, color)  # type: ignore[arg-type]
        names = [f.relative_to(path).as_posix() for f in found.samples.files]
        return {
            "shape": found.images.shape[1:],
            "values": dict(zip(names, found.images, strict=True)),
            "count": np.bincount(found.samples.labels).tolist(),
            "patients": sorted(found.samples.patients),
        }

    return read


def by_pillow(
    color: str = "grey", white: int = 255, masks: Sequence[str] = ()
) -> Callable[[Path], Facts]:
    def truth(path: Path) -> Facts:
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.parent != path)
        files = [f for f in files if f.name[0] != "." and f.stem not in masks]
        values = {}
        for file in files:
            with Image.open(file) as opened:
                image: Any = ImageOps.exif_transpose(opened)
                if white != 255:
                    array = np.asarray(image).astype(float) * 255 / white
                    values[file.relative_to(path).as_posix()] = np.round(array)[None]
                    continue
                array = np.asarray(image.convert("L" if color == "grey" else "RGB"))
            values[file.relative_to(path).as_posix()] = (
                array[None] if color == "grey" else array.transpose(2, 0, 1)
            )
        counts = [sum(name.startswith(kind) for name in values) for kind in ("ill", "well")]
        shape = ((1 if color == "grey" else 3), *SIZE)
        return {"shape": shape, "values": values, "count": counts, "patients": sorted(values)}

    return truth


def mode(name: str, **how: Any) -> Callable[[int], Image.Image]:
    def of(n: int) -> Image.Image:
        image = Image.fromarray(np.stack([grey(n + k) for k in range(3)], axis=-1))
        if name == "P":
            return image.quantize(16)
        if name in ("LA", "RGBA"):
            image = image.convert(name)
            image.putalpha(Image.fromarray(np.full(SIZE, how.get("alpha", 255), np.uint8)))
            return image
        return image.convert(name)

    return of


def bits(count: int, dtype: str = "u2") -> Callable[[int], Image.Image]:
    def of(n: int) -> Image.Image:
        values = grey(n, 1 << count, dtype)
        values[0, 0] = (1 << count) - 1
        return Image.fromarray(values)

    return of


def of_exif(path: Path, n: int) -> None:
    image = Image.fromarray(grey(n).T.copy())  # as tall as others are wide
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(path.with_suffix(".jpg"), exif=exif, quality=100)


def several(ending: str) -> Save:
    def save(path: Path, n: int) -> None:
        pages = [Image.fromarray(grey(n + k)) for k in range(3)]
        pages[0].save(path.with_suffix(f".{ending}"), save_all=True, append_images=pages[1:])

    return save


def renamed(save: Save, old: str, new: str) -> Save:
    def again(path: Path, n: int) -> None:
        save(path, n)
        path.with_suffix(f".{old}").rename(path.with_suffix(f".{new}"))

    return again


def content(data: bytes, name: str = "ill/p9.png") -> Callable[[Path], object]:
    def after(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return after


def masks_beside(folder: Path) -> None:
    for name in ("ill/p0_mask", "ill/p0_mask_1", "well/p1_segmentation"):
        Image.fromarray(grey(7)).save(folder / f"{name}.png")


def cut_jpeg(folder: Path) -> None:
    file = folder / "ill/p0.jpg"
    file.write_bytes(file.read_bytes()[:-60])


def without_cache(folder: Path) -> Facts:
    (folder / ".cache/p1.png").unlink()
    return by_pillow()(folder)


PNG_BYTES = io.BytesIO()
Image.fromarray(grey()).save(PNG_BYTES, "PNG")
NO_IMAGE = "cannot be read as an image"
PICTURES = {
    "8 bits": Set(classes(saved()), pictures(), by_pillow()),
    "colours": Set(classes(saved(of=mode("RGB"))), pictures("rgb"), by_pillow("rgb")),
    "colours as grey": Set(classes(saved(of=mode("RGB"))), pictures(), by_pillow()),
    "1 bit": Set(classes(saved(of=mode("1"))), pictures(), by_pillow()),
    "palette": Set(classes(saved(of=mode("P"))), pictures("rgb"), by_pillow("rgb")),
    "alpha, opaque": Set(classes(saved(of=mode("RGBA"))), pictures("rgb"), by_pillow("rgb")),
    "grey and alpha, opaque": Set(classes(saved(of=mode("LA"))), pictures(), by_pillow()),
    "alpha, transparent": Set(classes(saved(of=mode("RGBA", alpha=9))), pictures("rgb"),
                              refused="is transparent in places"),
    "CMYK": Set(classes(saved("tif", of=mode("CMYK"))), pictures("rgb"), by_pillow("rgb")),
    "CMYK in JPEG": Set(classes(saved("jpg", of=mode("CMYK"))), pictures("rgb"), by_pillow("rgb")),
    "YCbCr": Set(classes(saved("jpg", of=mode("RGB"))), pictures("rgb"), by_pillow("rgb")),
    "rotated by EXIF": Set(classes(of_exif), pictures(), by_pillow()),
    "16 bits": Set(classes(saved(of=bits(16))), pictures(), by_pillow(white=65535)),
    "12 of 16 bits": Set(classes(saved(of=bits(12))), pictures(), by_pillow(white=4095),
                         line="use 12 bits"),
    "16 bits of TIFF": Set(classes(saved("tif", of=bits(10))), pictures(), by_pillow(white=1023),
                           line="use 10 bits"),
    "16 bits, white is 0": Set(classes(saved("tif", of=bits(16), tiffinfo={262: 0})), pictures(),
                               refused="stores white as 0"),
    "32 bits": Set(classes(saved("tif", of=bits(20, "i4"))), pictures(), refused="32 bits"),
    "floats": Set(classes(saved("tif", of=lambda n: Image.fromarray(grey(n) / np.float32(7)))),
                  pictures(), refused="32 bits"),
    "WebP": Set(classes(saved("webp", lossless=True)), pictures(), by_pillow()),
    "GIF": Set(classes(saved("gif")), pictures(), by_pillow()),
    "BMP": Set(classes(saved("bmp")), pictures(), by_pillow()),
    "jfif": Set(classes(renamed(saved("jpg"), "jpg", "jfif")), pictures(), by_pillow()),
    "JPEG, called .png": Set(classes(renamed(saved("jpg"), "jpg", "png")), pictures(), by_pillow()),
    "moving GIF": Set(classes(several("gif")), pictures(), refused="has 3 pages"),
    "TIFF of pages": Set(classes(several("tif")), pictures(), refused="has 3 pages"),
    "JPEG 2000": Set(classes(saved("jp2")), pictures(), refused="has no images"),
    "masks beside": Set(classes(saved(), masks_beside), pictures(),
                        by_pillow(masks=("p0_mask", "p0_mask_1", "p1_segmentation"))),
    "hidden files": Set(classes(saved(), content(PNG_BYTES.getvalue(), "ill/.hidden.png")),
                        pictures(), by_pillow()),
    "hidden folder": Set(classes(saved(), content(PNG_BYTES.getvalue(), ".cache/p1.png")),
                         pictures(), without_cache),
    "empty file": Set(classes(saved(), content(b"")), pictures(), refused=NO_IMAGE),
    "web page": Set(classes(saved(), content(b"<!DOCTYPE html>")), pictures(), refused=NO_IMAGE),
    "cut JPEG": Set(classes(saved("jpg"), cut_jpeg), pictures(), refused=NO_IMAGE),
    "classes in capitals": Set(
        classes(saved(), lambda f: (f / "ILL").mkdir() or saved()(f / "ILL/p7", 3)), pictures(),
        refused="'ILL' .* and 'ill' .* differ only in capitals"),
}  # fmt: skip


# Masks and pictures one by one


def alone(save: Save) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save(folder / "m", 0)
        return next(folder.glob("m.*"))

    return make


def as_mask(path: Path) -> Facts:
    values = read_mask(path)
    return {"shape": values.shape, "values": values}


def mask_by_pillow(path: Path) -> Facts:
    with Image.open(path) as image:
        values = np.asarray(image).astype(int)
    values = values[..., 0] if values.ndim == 3 else values
    return {"shape": values.shape, "values": values}


def as_picture(color: str) -> Callable[[Path], Facts]:
    def read(path: Path) -> Facts:
        pixels, _ = read_picture(path, color)  # type: ignore[arg-type]
        return {"shape": pixels.shape, "values": pixels}

    return read


def picture_by_pillow(path: Path) -> Facts:
    with Image.open(path) as image:
        values = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    return {"shape": values.shape, "values": values}


def codes(n: int = 0, top: int = 4, dtype: str = "u1") -> Image.Image:
    return Image.fromarray(grey(n, top, dtype))


def with_palette(n: int) -> Image.Image:
    image = codes().convert("P")
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    return image


MASKS = {
    "codes": Set(alone(saved(of=codes)), as_mask, mask_by_pillow),
    "one bit": Set(alone(saved(of=lambda n: Image.fromarray(grey() > 128))), as_mask,
                   mask_by_pillow),
    "palette of colours": Set(alone(saved(of=with_palette)), as_mask, mask_by_pillow),
    "16 bits": Set(alone(saved(of=lambda n: codes(0, 900, "u2"))), as_mask, mask_by_pillow),
    "grey as RGB": Set(alone(saved(of=lambda n: codes().convert("RGB"))), as_mask, mask_by_pillow),
    "colours": Set(alone(saved(of=mode("RGB"))), as_mask, refused="a picture with colours"),
    "fractions": Set(alone(saved("tif", of=lambda n: Image.fromarray(grey() / np.float32(7)))),
                     as_mask, refused="no whole numbers"),
    "grey picture of 16 bits": Set(alone(saved(of=bits(12))), as_picture("grey"),
                                   picture_by_pillow),
    "picture of floats": Set(alone(saved("tif", of=lambda n: Image.fromarray(
        grey() / np.float32(7)))), as_picture("grey"), picture_by_pillow),
    "one value": Set(alone(saved(of=lambda n: Image.new("L", SIZE[::-1], 9))), as_picture("grey"),
                     refused="the same value in every pixel"),
}  # fmt: skip


# Arrays

SPLITS = ("train", "val", "test")


def npz(
    change: Callable[[Array], Array] = lambda images: images,
    labels: Callable[[Array], Array] = lambda labels: labels,
    shape: Sequence[int] = (6, *SIZE),
    packed: bool = False,
) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        arrays = {}
        for n, split in enumerate(SPLITS):
            images = np.random.default_rng(n).integers(0, 255, shape).astype(np.uint8)
            arrays[f"{split}_images"] = change(images)
            arrays[f"{split}_labels"] = labels((np.arange(shape[0]) % 2)[:, None])
        (np.savez_compressed if packed else np.savez)(folder / "a.npz", **arrays)
        return folder / "a.npz"

    return make


def arrays(path: Path) -> Facts:
    found = read_medmnist(path)
    labels = found.samples.labels
    counts = np.bincount(labels) if labels.ndim == 1 else labels.sum(0).astype(int)
    return {
        "shape": found.images.shape[1:],
        "values": found.images,
        "count": counts.tolist(),
        "patients": len(set(found.samples.patients)),
    }


def by_numpy(shape: Sequence[int], order: Sequence[int] | None = None) -> Callable[[Path], Facts]:
    def truth(path: Path) -> Facts:
        with np.load(path) as held:
            images = np.concatenate([held[f"{split}_images"] for split in SPLITS])
        images = images if order is None else images.transpose(order)
        return {"shape": tuple(shape), "values": images.reshape(-1, *shape), "count": [9, 9],
                "patients": 18}  # fmt: skip

    return truth


UINT8 = "must be uint8"
NPZ = {
    "grey": Set(npz(), arrays, by_numpy((1, *SIZE))),
    "packed": Set(npz(packed=True), arrays, by_numpy((1, *SIZE))),
    "channel last": Set(npz(shape=(6, *SIZE, 1)), arrays, by_numpy((1, *SIZE))),
    "channel first": Set(npz(shape=(6, 1, *SIZE)), arrays, by_numpy((1, *SIZE))),
    "colours last": Set(npz(shape=(6, *SIZE, 3)), arrays, by_numpy((3, *SIZE), (0, 3, 1, 2))),
    "colours first": Set(npz(shape=(6, 3, *SIZE)), arrays, by_numpy((3, *SIZE))),
    "four channels": Set(npz(shape=(6, *SIZE, 4)), arrays, refused="neither one channel nor three"),
    "volumes": Set(npz(shape=(6, 8, *SIZE)), arrays, by_numpy((1, 8, *SIZE))),
    "Fortran's order": Set(npz(np.asfortranarray), arrays, by_numpy((1, *SIZE))),
    "big endian": Set(npz(labels=lambda a: a.astype(">i4")), arrays, by_numpy((1, *SIZE))),
    "objects": Set(npz(lambda a: a.astype(object)), arrays, refused="cannot be read as .npz"),
    "float16": Set(npz(lambda a: a.astype("f2")), arrays, refused=UINT8),
    "bool": Set(npz(lambda a: a > 128), arrays, refused=UINT8),
    "16 bits": Set(npz(lambda a: a.astype("u2")), arrays, refused=UINT8),
    "one hot labels": Set(npz(labels=lambda a: np.eye(2, dtype=int)[a[:, 0]]), arrays,
                          by_numpy((1, *SIZE))),
    "labels as floats": Set(npz(labels=lambda a: a / 1.0), arrays, refused="must be integers"),
    "labels of true and false": Set(npz(labels=lambda a: a > 0), arrays,
                                    refused="must be integers"),
    "labels fewer": Set(npz(labels=lambda a: a[:-1]), arrays, refused="6 train_images, but 5"),
}  # fmt: skip


# Tables

HEADER = ["patient", "hospital", "age", "size", "label"]
ROWS = [
    [f"P{n:03d}", f"h{n % 2}", str(40 + n), f"{n / 8 + 0.5:g}", "yes" if n % 3 else "no"]
    for n in range(12)
]
Cells = list[list[str]]


def text_of(rows: Cells, separator: str = ",", end: str = "\n") -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=separator, lineterminator=end).writerows(rows)
    return out.getvalue()


def table(
    change: Callable[[Cells], object] = lambda rows: None,
    separator: str = ",",
    end: str = "\n",
    encoding: str = "utf-8",
    text: Callable[[str], str] = lambda text: text,
) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        rows = [list(row) for row in (HEADER, *ROWS)]
        changed = change(rows)
        content = text(text_of(changed if isinstance(changed, list) else rows, separator, end))
        (folder / "t.csv").write_bytes(content.encode(encoding))
        return folder / "t.csv"

    return make


def read_table(**more: Any) -> Callable[[Path], Facts]:
    def read(path: Path) -> Facts:
        given = {"centre": "hospital", "patient": "patient", "categorical": "auto", **more}
        found = read_csv(path, "label", **given)
        columns = {}
        for at, name in enumerate(found.names):
            cells = found.features[:, at].tolist()
            if name in found.categories:
                kinds = found.categories[name]
                columns[name] = [None if math.isnan(c) else kinds[int(c)] for c in cells]
            else:
                columns[name] = [None if math.isnan(c) else c for c in cells]
        rows, cells = found.accounts
        return {
            "shape": found.features.shape,
            "values": {**columns, "label": [found.classes[k] for k in found.labels]},
            "count": len(found.labels),
            "patients": list(zip(found.patients, found.centres, strict=True)),
            "account": (rows.taken, rows.total, cells.taken, cells.total),
        }

    return read


def by_csv(
    encoding: str = "utf-8",
    separator: str = ",",
    number: Callable[[str], float | str | None] = float,
    skip: int = 0,
    texts: Sequence[str] = (),
    keep: Callable[[list[str]], bool] = lambda row: True,
    out: Sequence[str] = (),
) -> Callable[[Path], Facts]:
    """The cells by Python's csv."""

    def truth(path: Path) -> Facts:
        lines = path.read_bytes().decode(encoding).split("\n", skip)[-1]
        every = list(csv.reader(io.StringIO(lines, newline=""), delimiter=separator))
        head, rows = every[0], [row for row in every[1:] if "".join(row).strip()]
        taken = [row for row in rows if keep(row)]
        at = {name.strip(): k for k, name in enumerate(head)}
        features = [n for n in at if n not in ("patient", "hospital", "label", "", *out)]

        def cell(name: str, text: str) -> float | str | None:
            return number(text) if name not in texts else " ".join(text.split()) or None

        values = {n: [cell(n, row[at[n]]) for row in taken] for n in features}
        known = sum(v is not None for column in values.values() for v in column)
        return {
            "shape": (len(taken), len(features)),
            "values": {**values, "label": [row[at["label"]].strip() for row in taken]},
            "count": len(taken),
            "patients": [(r[at["patient"]].strip(), r[at["hospital"]].strip()) for r in taken],
            "account": (len(taken), len(every) - 1, known, len(features) * len(taken)),
        }

    return truth


def cells(name: str, texts: Sequence[str], at: int = 1) -> Callable[[Cells], None]:
    """Puts texts into a column from a row on, a new one where there is none of that name."""

    def change(rows: Cells) -> None:
        if name not in rows[0]:
            rows[0].insert(2, name)
            for n, row in enumerate(rows[1:]):
                row.insert(2, texts[n % len(texts)])
            return
        column = rows[0].index(name)
        for n, text in enumerate(texts):
            rows[at + n][column] = text

    return change


def each(change: Callable[[str], str], *names: str) -> Callable[[Cells], None]:
    def apply(rows: Cells) -> None:
        for row in rows[1:]:
            for name in names:
                column = rows[0].index(name)
                row[column] = change(row[column])

    return apply


def comma(text: str) -> float:
    return float(text.replace(",", "."))


def lacking(*words: str) -> Callable[[str], float | str | None]:
    return lambda text: None if text.strip().lower() in words else float(text)


WORDS = (
    "?", ".", "", " ", "nan", "NaN", "-nan", "NA", "<NA>", "n/a", "N.A.", "#N/A", "#NA", "None",
    "null", "NULL", "NaT", "#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NUM!", "#NAME?",
)  # fmt: skip
NO_NUMBER = r"column age: '{}' is not a number"


def limit(half: bool) -> Callable[[str], float | str | None]:
    def number(text: str) -> float:
        if text[0] in "<>":
            return float(text[1:].replace(",", ".")) / (2 if half and text[0] == "<" else 1)
        return float(text)

    return number


def word_rows(word: str) -> Set:
    return Set(
        table(cells("age", [word, word], 2)),
        read_table(),
        by_csv(number=lacking(word.strip().lower())),
    )


TABLES = {
    "UTF-8": Set(table(), read_table(), by_csv()),
    "byte-order mark": Set(table(encoding="utf-8-sig"), read_table(), by_csv("utf-8-sig")),
    "UTF-16": Set(table(encoding="utf-16"), read_table(), by_csv("utf-16")),
    "UTF-16 without mark": Set(table(encoding="utf-16-le"), read_table(), refused="a NUL byte"),
    "UTF-32": Set(table(encoding="utf-32"), read_table(), refused="save it as CSV UTF-8"),
    "Latin-1": Set(table(each(lambda t: f"Zürich {t}", "hospital"), encoding="latin-1"),
                   read_table(), by_csv("latin-1"), line="is read as Latin-1"),
    "Mac's line ends": Set(table(end="\r"), read_table(), by_csv()),
    "Windows' line ends": Set(table(end="\r\n"), read_table(), by_csv()),
    "sep=;": Set(table(separator=";", text=lambda t: f"sep=;\n{t}"), read_table(),
                 by_csv(separator=";", skip=1)),
    "semicolons": Set(table(separator=";"), read_table(), by_csv(separator=";")),
    "tabs": Set(table(separator="\t"), read_table(), by_csv(separator="\t")),
    "decimal commas": Set(table(each(lambda t: f"{float(t) + 0.25:.2f}".replace(".", ","), "size"),
                                separator=";"), read_table(), by_csv(separator=";", number=comma),
                          line="decimal commas in size"),
    "thousands": Set(table(each(lambda t: f"1,0{t}", "age"), separator=";"), read_table(),
                     refused=NO_NUMBER.format("1,040")),
    "thousands by points": Set(table(cells("age", ["1.041,5"]), separator=";"), read_table(),
                               refused=NO_NUMBER.format(r"1\.041,5")),
    "thousands by apostrophes": Set(table(cells("age", ["1'041"])), read_table(),
                                    refused="is not a number"),
    "line breaks in quotes": Set(table(cells("note", ["a\nb", "c"])), read_table(),
                                 by_csv(texts=["note"])),
    "quotes in quotes": Set(table(cells("note", ['say "a"', "c, d"])), read_table(),
                            by_csv(texts=["note"])),
    "open quote": Set(table(text=lambda t: t.replace("P003", '"P003')), read_table(),
                      refused="cannot be read as CSV"),
    "columns twice": Set(table(lambda rows: [[*row, row[2]] for row in rows]), read_table(),
                         refused="column age occurs twice"),
    "columns twice but for capitals": Set(table(lambda rows: [
        [*row, "AGE" if n == 0 else row[2]] for n, row in enumerate(rows)]), read_table(),
        refused="occurs twice"),
    "a cell more": Set(table(lambda rows: rows[3].append("7")), read_table(),
                       refused="data row 3: 6 cells, but 5 columns"),
    "a cell fewer": Set(table(lambda rows: rows[3].pop()), read_table(),
                        refused="data row 3: 4 cells, but 5 columns"),
    "commas at the end": Set(table(text=lambda t: t.replace("\n", ",,\n")), read_table(), by_csv()),
    "empty rows": Set(table(text=lambda t: t.replace("P003", "\n,,,,\nP003")), read_table(),
                      lambda p: {**by_csv()(p), "account": (12, 13, 24, 24)}),
    "spaces": Set(table(text=lambda t: t.replace(",", " , ")), read_table(),
                  by_csv(number=lambda t: float(t.strip()))),
    **{f"missing as {word!r}": word_rows(word) for word in WORDS},
    "missing by data.missing": Set(table(cells("age", ["k.A.", "-9"], 2)),
                                   read_table(missing=["k.A.", -9]),
                                   by_csv(number=lacking("k.a.", "-9"))),
    "limits": Set(table(cells("age", ["<0.5", "<5"], 2)), read_table(),
                  refused=r"'<0\.5' is not a number.*data\.limits=half"),
    "half of limits": Set(table(cells("age", ["<0.5", ">90"], 2)), read_table(limits="half"),
                          by_csv(number=limit(True)), line="2 cells are limits"),
    "limits as values": Set(table(cells("age", ["<0.5", ">90"], 2)), read_table(limits="value"),
                            by_csv(number=limit(False)), line="2 cells are limits"),
    "codes with zeros": Set(table(cells("icd", ["0744", "744", "01882"])), read_table(),
                            by_csv(texts=["icd"]), line="a leading zero"),
    "codes with exponents": Set(table(cells("icd", ["1E50", "2E65"])), read_table(),
                                by_csv(texts=["icd"]), line="1E50"),
    "exponents": Set(table(cells("lab", ["1e-3", "2.5E+2", "7"])), read_table(), by_csv()),
    "infinity": Set(table(cells("age", ["inf"])), read_table(), refused=NO_NUMBER.format("inf")),
    "underscores": Set(table(cells("age", ["4_1"])), read_table(), refused=NO_NUMBER.format("4_1")),
    "Arabic digits": Set(table(cells("age", ["٤١"])), read_table(), by_csv()),
    "per cent": Set(table(each(lambda t: f"{t}%", "age")), read_table(),
                    refused=NO_NUMBER.format("40%")),
    "units": Set(table(cells("age", ["41 y"])), read_table(), refused=NO_NUMBER.format("41 y")),
    "dates": Set(table(cells("seen", ["2019-01-31", "12.1.2020"])), read_table(),
                 by_csv(out=["seen"]), line="seen .dates or times."),
    "dates among numbers": Set(table(cells("age", ["2019-01-31"])), read_table(),
                               refused="is a date or time, not a number"),
    "truths": Set(table(cells("smokes", ["TRUE", "FALSE"])), read_table(),
                  by_csv(texts=["smokes"])),
    "truths of two spellings": Set(table(cells("smokes", ["TRUE", "False", "true"])), read_table(),
                                   by_csv(texts=["smokes"]), line="'TRUE' and 'true' count as"),
    "ja and nein": Set(table(each(lambda t: "ja" if t == "yes" else "nein", "label")),
                       read_table(), refused=r"data\.positive=\[ja\]"),
    "yes and Yes": Set(table(cells("label", ["Yes"])), read_table(), refused="only in capitals"),
    "labels 1 and 1.0": Set(table(lambda rows: each(lambda t: "1" if t == "yes" else "0", "label")(
        rows) or cells("label", ["1.0", "0.0"], 2)(rows)), read_table(), lambda p: {
            **by_csv()(p), "values": {**by_csv()(p)["values"], "label": [
                t.removesuffix(".0") for t in by_csv()(p)["values"]["label"]]}}),
    "row numbers": Set(table(cells("n", [str(n) for n in range(12)])), read_table(),
                       by_csv(out=["n"]), line="row numbers"),
    "rows without label": Set(table(cells("label", ["", "NA"], 2)), read_table(unlabelled="drop"),
                              lambda p: {**by_csv(keep=lambda r: r[4] not in ("", "NA"))(p),
                                         "account": (10, 12, 20, 20)}, line="are left out"),
    "Excel": Set(lambda f: content(b"PK\x03\x04", "t.csv")(f) or f / "t.csv", read_table(),
                 refused="is an Excel or zip file"),
    "web page": Set(lambda f: content(b"<!DOCTYPE html>\n<html>\n<p>log in</p>", "t.csv")(f) or
                    f / "t.csv", read_table(), refused="is a web page"),
    "empty": Set(lambda f: content(b"", "t.csv")(f) or f / "t.csv", read_table(),
                 refused="has no data rows"),
}  # fmt: skip


# Names

CAPITALS, NUMBER, UNSEEN = (
    f"differ only in {how}" for how in ("capitals", "the format of a number", "signs that nobody")
)
COMPOSED, APART = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))
PAIRS = {  # two spellings, and the words of the refusal; "" where they are read as one
    "100 and 100.0": ("100", "100.0", NUMBER),
    "P001 and p001": ("P001", "p001", CAPITALS),
    "composed and apart": (COMPOSED, APART, ""),
    "a sign of no width": ("P001", "P\u200b001", UNSEEN),
    "a space that does not break": ("P 001", "P\u00a0001", ""),
    "007 and 7": ("007", "7", None),
}


def names_of(kind: str, one: str, other: str) -> Callable[[Path], Path]:
    column = {"patient": 0, "hospital": 1}[kind]

    def change(rows: Cells) -> None:
        for row in rows[1:]:
            row[0] = f"Q{row[0]}"
        for at, name in ((2, one), (4, other)):
            rows[at][column] = name
            if kind == "patient":
                rows[at][1] = "h0"

    return table(change)


def people(path: Path) -> Facts:
    found = read_table()(path)["patients"]
    return {"patients": len({p for p, _ in found}), "count": len({c for _, c in found})}


def people_by_csv(path: Path) -> Facts:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.reader(file)][1:]
    names = [
        [" ".join(unicodedata.normalize("NFC", row[n]).split()) for row in rows] for n in (0, 1)
    ]
    return {"patients": len({*names[0]}), "count": len({*names[1]})}


def a_list(
    keys: Sequence[Mapping[str, Any]] | None = None,
    name: str = "dataset.json",
    mark: str = "",
    slash: str = "/",
    image: Array | None = None,
    change: Callable[[dict[str, Any]], object] = lambda content: None,
    after: Callable[[Path], object] = lambda folder: None,
) -> Callable[[Path], Path]:
    """A list in the layout of the decathlon, with further keys for its entries."""

    def make(folder: Path) -> Path:
        entries: list[dict[str, Any]] = []
        for n in range(4):
            entry: dict[str, Any] = {}
            for kind in ("image", "label"):
                file = folder / f"{kind}sTr" / f"c{n}.nii.gz"
                file.parent.mkdir(exist_ok=True)
                voxels = (noise(seed=n) > 450).astype(np.int16)
                if kind == "image":
                    voxels = noise(seed=n) if image is None else image
                nib.save(nib.Nifti1Image(voxels, straight()), file)
                entry[kind] = f".{slash}{kind}sTr{slash}c{n}.nii.gz"
            entries.append({**entry, **(keys[n] if keys else {})})
        content = {
            "modality": {"0": "MRI"},
            "labels": {"0": "background", "1": "tumour"},
            "numTraining": 4,
            "training": entries,
        }
        change(content)
        (folder / name).write_text(mark + json.dumps(content), "utf-8")
        after(folder)
        return folder / name

    return make


def cases(reader: Callable[[Path], Any]) -> Callable[[Path], Facts]:
    """What a reader of cases lists, and the values of the first."""

    def read(path: Path) -> Facts:
        one = reader(path)
        patients = [*by_id(one.patients()).values()]
        first = one.cases_of(patients[0])[0]
        image = one.read(first)["label"].numpy()
        raw = one.raw(first)["image"].numpy() if hasattr(one, "raw") else image
        return {
            "patients": sorted(p.id for p in patients),
            "count": sum(len(one.cases_of(p)) for p in patients),
            "values": np.sort(raw, None),
            "shape": raw.shape,
        }

    return read


def listed(
    patients: Sequence[str], count: int = 4, file: str = "imagesTr/c0.nii.gz"
) -> Callable[[Path], Facts]:
    def truth(path: Path) -> Facts:
        folder = path if path.is_dir() else path.parent
        array = np.asanyarray(nib.load(folder / file).dataobj)  # type: ignore[attr-defined]
        return {
            "patients": list(patients),
            "count": count,
            "values": np.sort(array, None),
            "shape": (1, *array.shape),
        }

    return truth


def keyed(kind: str, one: Any, other: Any) -> Callable[[Path], Path]:
    where = {"centre": "h"} if kind == "patient" else {}
    return a_list([{kind: value, **where} for value in (one, "b", other, "d")])


def of_list(path: Path) -> Facts:
    patients = by_id(DatalistReader(path).patients()).values()
    return {"patients": len(patients), "count": len({p.centre for p in patients})}


FOUR = ["c0", "c1", "c2", "c3"]
DATALIST = cases(DatalistReader)


def pictures_and_masks(rows: Sequence[Sequence[str]]) -> Callable[[Path], Path]:
    """A table of pictures and masks."""

    def make(folder: Path) -> Path:
        for n, _ in enumerate(rows):
            Image.fromarray(grey(n)).save(folder / f"i{n}.png")
            Image.fromarray((grey(n) > 128).astype(np.uint8)).save(folder / f"m{n}.png")
        lines = [["image", "mask", "patient", "centre"]]
        lines += [[f"i{n}.png", f"m{n}.png", *row] for n, row in enumerate(rows)]
        (folder / "images.csv").write_text(text_of(lines), "utf-8")
        return folder / "images.csv"

    return make


def labelled_pictures(rows: Sequence[Sequence[str]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for n, _ in enumerate(rows):
            Image.fromarray(grey(n)).save(folder / f"i{n}.png")
        lines = [["image", "label", "patient", "centre"]]
        lines += [[f"i{n}.png", str(n % 2), *row] for n, row in enumerate(rows)]
        (folder / "images.csv").write_text(text_of(lines), "utf-8")
        return folder / "images.csv"

    return make


def of_masks(path: Path) -> Facts:
    return {"patients": len(by_id(ImageMasksReader(path).patients()))}


def of_labels(path: Path) -> Facts:
    found = read_image_table(path, SIZE)
    return {"patients": len(by_id(found.samples.list_patients()))}


def by_pattern(path: Path) -> Facts:
    found = read_image_folder(path, SIZE, patient_pattern=r"^([^_]+)_")
    return {"patients": len(by_id(found.samples.list_patients()))}


def folders(names: Sequence[str], centres: Mapping[str, str] | None = None) -> Any:
    def make(folder: Path) -> Path:
        for n, name in enumerate(names):
            (folder / name).mkdir()
            for part in ("ct", "m"):
                voxels = noise(seed=n) if part == "ct" else (noise(seed=n) > 450).astype(np.int16)
                nib.save(nib.Nifti1Image(voxels, straight()), folder / name / f"{part}.nii.gz")
        if centres is not None:
            lines = [["case", "hospital"], *map(list, centres.items())]
            (folder / "centres.csv").write_text(text_of(lines), "utf-8")
        return folder

    return make


def of_folders(path: Path) -> Facts:
    reader = FolderReader(path, {"CT": "ct.nii.gz"}, "m.nii.gz", None)
    patients = by_id(reader.patients()).values()
    return {"patients": len(patients), "count": len({p.centre for p in patients})}


def name_rows() -> dict[str, Set]:
    """Each pair of spellings in each place where patients or hospitals are named."""
    rows = {}
    for name, (one, other, refused) in PAIRS.items():
        two = refused is None
        for kind in ("patient", "hospital"):
            rows[f"{kind} of a table: {name}"] = Set(
                names_of(kind, one, other), people, people_by_csv, refused or ""
            )
        for kind in ("patient", "centre"):
            of_kind = {"patient": "patients", "centre": "count"}[kind]
            truth = {"patients": 4, "count": 4 if kind == "centre" else 1}
            truth[of_kind] -= not two
            rows[f"{kind} of a list: {name}"] = Set(
                keyed(kind, one, other),
                of_list,
                lambda p, truth=truth: truth,  # type: ignore[misc]
                refused or "",
            )
        people_rows = [[one, "h"], ["b", "h"], [other, "h"], ["d", "h"]]
        wanted = {"patients": 4 if two else 3}
        rows[f"patient of masks: {name}"] = Set(
            pictures_and_masks(people_rows), of_masks, lambda p, w=wanted: w, refused or ""
        )  # type: ignore[misc]
        rows[f"patient of pictures: {name}"] = Set(
            labelled_pictures(people_rows), of_labels, lambda p, w=wanted: w, refused or ""
        )  # type: ignore[misc]
        if refused and "number" not in refused:
            rows[f"folders: {name}"] = Set(folders([one, "b", other]), of_folders, None, refused)
    return rows


def named_pictures(one: str, other: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for kind, names in (("ill", (one, "q")), ("well", (other, "r"))):
            (folder / kind).mkdir()
            for n, name in enumerate(names):
                Image.fromarray(grey(n)).save(folder / kind / f"{name}_1.png")
        return folder

    return make


NAMES = {
    **name_rows(),
    "pattern: P001 and p001": Set(named_pictures("P001", "p001"), by_pattern, refused=CAPITALS),
    "numbers 100 and 100.0 of a list": Set(keyed("patient", 100, 100.0), DATALIST, refused=NUMBER),
    "centres.csv: NFC and NFD": Set(
        folders(["a", "b", "c"], {"a": COMPOSED, "b": APART, "c": "Bern"}), of_folders,
        lambda p: {"patients": 3, "count": 2}),
    "centres.csv: Basel and basel": Set(
        folders(["a", "b", "c"], {"a": "Basel", "b": "basel", "c": "Bern"}), of_folders,
        refused=CAPITALS),
    "centres.csv with the names of files": Set(
        folders(["a", "b", "c"], {"a.nii.gz": "Basel", "b_0000.nii.gz": "Bern", "c": "Bern"}),
        of_folders, lambda p: {"patients": 3, "count": 2}),
    "centres.csv names none": Set(folders(["a", "b"], {"a": "Basel"}), of_folders,
                                  refused=r"centres\.csv names no hospital for case b"),
    "case names in capitals": Set(folders(["a", "b"], {"A": "Basel", "b": "Bern"}), of_folders,
                                  refused=r"names no hospital for case a"),
}  # fmt: skip


# Lists of volumes


def nnunet(
    version: int = 2, masks: Sequence[int] = range(4), count: int = 4, mark: str = "",
    ending: str = ".nii.gz", change: Callable[[dict[str, Any]], object] = lambda content: None,
) -> Callable[[Path], Path]:  # fmt: skip
    def make(folder: Path) -> Path:
        for n in range(4):
            for part, name in (("imagesTr", f"c{n}_0000"), ("labelsTr", f"c{n}")):
                if part == "imagesTr" or n in masks:
                    (folder / part).mkdir(exist_ok=True)
                    voxels = noise(seed=n) if "i" in part[:1] else noise(seed=n) > 450
                    image = nib.Nifti1Image(voxels.astype(np.int16), straight())
                    nib.save(image, folder / part / f"{name}{ending}")
        if version == 2:
            content: dict[str, Any] = {
                "channel_names": {"0": "MRI"},
                "labels": {"background": 0, "tumour": 1},
                "file_ending": ending,
            }
        else:
            content = {
                "modality": {"0": "MRI"},
                "labels": {"0": "background", "1": "tumour"},
                "training": [
                    {"image": f"./imagesTr/c{n}.nii.gz", "label": f"./labelsTr/c{n}.nii.gz"}
                    for n in masks
                ],
            }
        content["numTraining"] = count
        change(content)
        (folder / "dataset.json").write_text(mark + json.dumps(content), "utf-8")
        return folder

    return make


NNUNET = cases(NnunetReader)
FIRST = "imagesTr/c0_0000.nii.gz"


def drop(*keys: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: [content.pop(key) for key in keys]


LISTS = {
    "MSD's list": Set(a_list(), DATALIST, listed(FOUR)),
    "byte-order mark": Set(a_list(mark="\ufeff"), DATALIST, listed(FOUR)),
    "backslashes": Set(a_list(slash="\\"), DATALIST, listed(FOUR)),
    "UTF-16": Set(lambda f: (p := a_list()(f)).write_bytes(p.read_text().encode("utf-16")) and p,
                  DATALIST, refused=r"dataset\.json"),
    "cut": Set(lambda f: (p := a_list()(f)).write_text(p.read_text()[:-30]) and p, DATALIST,
               refused=r"dataset\.json is not readable JSON"),
    "a name twice": Set(a_list(change=lambda c: c["training"].append(c["training"][0])), DATALIST,
                        refused="twice"),
    "4-D of ones": Set(a_list(image=noise((6, 5, 4, 1))), DATALIST,
                       lambda p: {**listed(FOUR)(p), "shape": (1, 6, 5, 4)}),
    "more volumes than channels": Set(a_list(image=noise((6, 5, 4, 3))), DATALIST,
                                      refused="holds 3 volumes .* but 1 is named"),
    "fewer volumes than channels": Set(a_list(change=lambda c: c.update(modality={
        "0": "FLAIR", "1": "T1"})), DATALIST, refused="has 1 channels, but 2 are needed"),
    "a file that is missing": Set(a_list(after=lambda f: (f / "imagesTr/c0.nii.gz").unlink()),
                                  DATALIST, refused=r"c0\.nii\.gz is missing"),
    "an unknown value": Set(a_list(change=lambda c: c.update(labels={"0": "b", "2": "x"})),
                            DATALIST, refused="unknown label value 1; known: 0, 2"),
    "no labels": Set(a_list(change=drop("labels")), DATALIST, refused="has no usable labels"),
    "no modality": Set(a_list(change=drop("modality")), DATALIST, listed(FOUR)),
    "numTraining of MSD": Set(a_list(change=lambda c: c.update(numTraining=9)), DATALIST,
                              listed(FOUR), line="numTraining 9"),
    "two time points": Set(
        lambda f: a_list(change=lambda c: [e.update(patient="p") for e in c["training"][:2]])(f),
        DATALIST, listed(["c2", "c3", "p"], file="imagesTr/c2.nii.gz")),
    "nnU-Net v2": Set(nnunet(), NNUNET, listed(FOUR, file=FIRST)),
    "nnU-Net v1": Set(nnunet(1), NNUNET, listed(FOUR, file=FIRST)),
    "nnU-Net, byte-order mark": Set(nnunet(mark="\ufeff"), NNUNET, listed(FOUR, file=FIRST)),
    "images without mask": Set(nnunet(masks=[0, 1, 2]), NNUNET, listed(FOUR[:3], 3, FIRST),
                               line="1 cases have no mask"),
    "numTraining": Set(nnunet(count=7), NNUNET, listed(FOUR, file=FIRST), line="numTraining 7"),
    "nnU-Net of PNGs": Set(nnunet(change=lambda c: c.update(file_ending=".png")), NNUNET,
                           refused="data=image_masks"),
    "endings in capitals": Set(nnunet(ending=".NII.GZ"), NNUNET,
                               listed(FOUR, file="imagesTr/c0_0000.NII.GZ")),
    "no channel names": Set(nnunet(change=drop("channel_names")), NNUNET,
                            refused="lacks channel_names"),
    "MSD of brains": Set(a_list(image=noise((6, 5, 4, 4)), change=lambda c: c.update(modality={
        str(n): name for n, name in enumerate(("FLAIR", "T1w", "t1gd", "T2w"))})),
        lambda p: cases(MSDReader)(p.parent),
        lambda p: {**listed(FOUR)(p), "shape": (4, 6, 5, 4)}),
}  # fmt: skip


# LUNA16


def luna16(places: Sequence[str]) -> Callable[[Path], Path]:
    """Scans in subsets, with a shadow of each as a Mac makes them, and masks of lungs."""

    def make(folder: Path) -> Path:
        rows = ["seriesuid,coordX,coordY,coordZ,class"]
        for n, place in enumerate(places):
            voxels = noise((8, 8, 8), seed=n)
            for where in (place, "seg-lungs-LUNA16"):
                (folder / where).mkdir(parents=True, exist_ok=True)
                sitk.WriteImage(sitk.GetImageFromArray(voxels), str(folder / where / f"1.{n}.mhd"))
            (folder / place / f"._1.{n}.mhd").write_bytes(b"\0" * 99)
            rows += [f"1.{n},3,3,3,1", f"1.{n} ,2,2,2,0"]
        (folder / "candidates.csv").write_text("\n".join(rows))
        return folder

    return make


def of_luna16(path: Path) -> Facts:
    patients = Luna16Reader(path, negatives_per_positive=None).patients()
    return {
        "patients": [p.id for p in patients],
        "count": [p.counts for p in patients],
        "account": sorted(f.name for p in patients for f in p.files.values()),
    }


def three_scans(path: Path) -> Facts:
    return {
        "patients": ["1.0", "1.1", "1.2"],
        "count": [(1, 1)] * 3,
        "account": sorted(f"1.{n}.{ending}" for n in range(3) for ending in ("mhd", "raw")),
    }


LUNA16 = {
    "one folder": Set(luna16(["."] * 3), of_luna16, three_scans),
    "subsets": Set(luna16(["subset0", "subset0", "subset7"]), of_luna16, three_scans),
    "nested subsets": Set(luna16(["subset0/subset0"] * 3), of_luna16, three_scans),
    "no scans": Set(luna16(["scans"] * 3), of_luna16, refused=r"has no \.mhd scans"),
}


# What was seen and taken


def accounted(*keys: str) -> Callable[[Path], Facts]:
    def read(path: Path) -> Facts:
        run = ["partition=round_robin", "partition.num_clients=1", f"data.path={path}", *keys]
        module = build(described(run).data)
        module.plan()
        (one,) = module.accounts
        left = {why.split(": ")[0]: count for why, (count, _) in one.left_out.items()}
        return {
            "account": (one.total, one.taken, left),
            "patients": len(module.patients),
            "count": one.total == one.taken + sum(left.values()),
        }

    return read


def by_walk(taken: int, left: Mapping[str, int], patients: int) -> Callable[[Path], Facts]:
    def truth(path: Path) -> Facts:
        folder = path if path.is_dir() else path.parent
        system = ("Thumbs.db", "desktop.ini", "__MACOSX")
        seen = [
            f
            for f in folder.rglob("*")
            if f.is_file()
            and not any(p[0] == "." or p in system for p in f.relative_to(folder).parts)
        ]
        return {"account": (len(seen), taken, dict(left)), "patients": patients, "count": True}

    return truth


def clutter(folder: Path) -> None:
    for name in ("Thumbs.db", ".DS_Store", ".git/a.png", "__MACOSX/b.png", "desktop.ini"):
        content(b"x", name)(folder)
    content(b"x", "notes.txt")(folder)


ACCOUNTS = {
    "pictures and others": Set(
        classes(saved(), lambda f: (clutter(f), content(b"x", "ill/a.jp2")(f), masks_beside(f))),
        accounted("data=image_folder"),
        by_walk(6, {".jp2": 1, ".png": 3, ".txt": 1}, 6)),
    "lists": Set(
        lambda f: a_list(after=clutter)(f).parent,
        accounted("data=datalist", "data.patch_size=[4,4]"),
        by_walk(9, {".txt": 1}, 4)),
    "nnU-Net without masks": Set(
        lambda f: nnunet(masks=[0, 1, 2])(f), accounted("data=nnunet", "data.patch_size=[4,4]"),
        by_walk(7, {".nii.gz": 1}, 3)),
}  # fmt: skip


SETS = {
    f"{kind}: {name}": one
    for kind, rows in (
        ("picture", PICTURES),
        ("mask", MASKS),
        ("npz", NPZ),
        ("table", TABLES),
        ("name", NAMES),
        ("list", LISTS),
        ("LUNA16", LUNA16),
        ("account", ACCOUNTS),
    )
    for name, one in rows.items()
}
