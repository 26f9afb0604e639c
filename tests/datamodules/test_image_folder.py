"""Class-named folders of images: formats, patients, hospitals, and what must not pass."""

from functools import partial

import numpy as np
import pytest
import SimpleITK as sitk
import torch
from PIL import Image

from medfed.common.seeding import numpy_rng
from medfed.config.compose import load
from medfed.config.description import describe
from medfed.datamodules.duplicates import find_duplicates
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_label import LabelImbalance
from medfed.datamodules.readers.image_folder import read_image_folder, read_image_table
from medfed.datamodules.splits import SPLITS
from medfed.standalone.errors import ConfigError, DataError
from tests.integration.runs import data_and_task

PATIENT, CENTRE = "^(p[0-9]+)_", "_(Bern|Basel)_"


def pixels(*shape):
    return numpy_rng("folder", *shape).integers(0, 256, shape, dtype=np.uint8)


def save(array, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Twelve patients at two hospitals with three lesions each, benign or malignant or both."""
    rng = numpy_rng("folder")
    for patient in range(12):
        centre = ("Bern", "Basel")[patient % 2]
        for lesion in range(3):
            kind = ("benign", "malignant")[int(rng.random() < (patient % 4) / 3)]
            image = rng.integers(0, 256, (16, 16), dtype=np.uint8)
            save(image, tmp_path / kind / f"p{patient}_{centre}_{lesion}.png")
    return tmp_path


def module(path, partition=None, **settings):
    reader = partial(read_image_folder, **{"size": (16, 16), **settings})
    data = ImageDataModule(partition or RoundRobin(2), reader, path=str(path))
    data.setup()
    return data


def test_pixels_are_those_that_simpleitk_reads(tmp_path):
    """PNG and TIFF, grey, colour and 16 bits; JPEG and BMP follow the same path."""
    grey, colour = pixels(20, 30), pixels(20, 30, 3)
    deep = pixels(20, 30).astype(np.uint16) * 257
    files = [
        save(grey, tmp_path / "a" / "1.png"),
        save(deep, tmp_path / "a" / "deeper" / "2.PNG"),
        save(deep, tmp_path / "b" / "3.tif"),
        save(grey, tmp_path / "b" / "4.tiff"),
    ]
    found = read_image_folder(tmp_path, (20, 30))
    assert list(found.samples.files) == files
    assert (found.classes, found.channels) == (("a", "b"), ("grey",))
    assert found.samples.labels.tolist() == [0, 0, 1, 1]
    for image, file in zip(found.images, files, strict=True):
        other = sitk.GetArrayFromImage(sitk.ReadImage(str(file))).astype(np.float64)
        scale = 257 if other.max() > 255 else 1
        assert np.array_equal(image[0], np.round(other / scale))
    for name in ("a/1.png", "b/3.bmp"):
        save(colour, tmp_path / "rgb" / name)
    found = read_image_folder(tmp_path / "rgb", (20, 30), color="rgb")
    assert found.channels == ("red", "green", "blue")
    for image in found.images:
        assert np.array_equal(np.moveaxis(image, 0, -1), colour)


def test_other_sizes_colours_and_orientations_are_brought_to_one(tmp_path):
    ramp = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (32, 1))
    save(ramp, tmp_path / "a" / "ramp.png")
    save(np.stack([ramp] * 3, -1), tmp_path / "a" / "ramp.jpg")
    save(np.dstack([ramp] * 3 + [np.full_like(ramp, 255)]), tmp_path / "b" / "alpha.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned by 90 degrees
    Image.fromarray(np.rot90(ramp)).save(tmp_path / "b" / "turned.jpg", exif=turned, quality=95)
    found = read_image_folder(tmp_path, (8, 16))
    assert found.images.shape == (4, 1, 8, 16)
    wanted = ramp.reshape(8, 4, 16, 4).mean((1, 3))  # the mean over what became one pixel
    for image in found.images:
        assert np.abs(image[0].astype(float) - wanted).max() < 6


def test_patients_stay_together_and_hospitals_are_clients(folder):
    data = module(folder, ByCentre(), patient_pattern=PATIENT, centre_pattern=CENTRE)
    assert list(data.clients) == ["Basel", "Bern"]
    seen = []
    for name, client in data.clients.items():
        for split in SPLITS:
            batches = list(client.eval_batches(split))
            cases = torch.cat([b["case"] for b in batches])
            assert torch.bincount(cases).tolist() == [3] * len(client.patients[split])
            assert len(client.patients[split]) >= 1
            seen += client.patients[split]
            assert all((int(p[1:]) % 2 == 0) == (name == "Bern") for p in client.patients[split])
    assert sorted(seen) == sorted(f"p{n}" for n in range(12))
    assert len(data.splits()["files"]) == 36
    plain = module(folder)
    assert sum(len(ids) for c in plain.clients.values() for ids in c.patients.values()) == 36


def test_every_split_is_thinned_to_the_wanted_shares(folder):
    partition = LabelImbalance(2, positive_fractions=[0.5, 0.5])
    data = module(folder, partition, patient_pattern=PATIENT)
    labels = {f.as_posix(): f.parent.name for f in folder.rglob("*.png")}
    kept = 0
    for client in data.clients.values():
        assert client.label_counts[0] == client.label_counts[1] > 0
        for split in SPLITS:
            found = torch.cat([b["label"] for b in client.eval_batches(split)])
            assert abs(int((found == 0).sum() - (found == 1).sum())) <= 1
            kept += len(found)
    assert 12 <= kept < len(labels)


def test_corrupt_images_are_named(folder):
    path = next(iter((folder / "benign").glob("*.png")))
    whole = path.read_bytes()
    for torn in (b"", b"no image", whole[: len(whole) // 2]):
        path.write_bytes(torn)
        with pytest.raises(
            DataError, match=rf"{path.name} cannot be read as an image \(.+\); mend"
        ):
            module(folder)
    Image.fromarray(np.zeros((8, 8), np.float32)).save(path.with_suffix(".tif"))
    path.unlink()
    with pytest.raises(DataError, match=r"\.tif cannot be read .*32 bits and no known range"):
        module(folder)


def test_folders_without_images_or_with_one_class(folder):
    (folder / "unsure").mkdir()
    with pytest.raises(DataError, match=r"unsure has no images; add images \(\.png"):
        module(folder)
    assert module(folder, classes=["malignant", "benign"]).class_names == ("malignant", "benign")
    with pytest.raises(DataError, match="nowhere is not a folder"):
        module(folder, classes=["benign", "nowhere"])
    with pytest.raises(DataError, match=r"a folder for each of two classes or more; found: benign"):
        module(folder, classes=["benign"])
    with pytest.raises(DataError, match=r"benign must hold a folder for each .* found: none"):
        module(folder / "benign")
    with pytest.raises(DataError, match=r"none is not a folder; set data\.path"):
        module(folder / "none")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"patient_pattern": "^(q[0-9]+)_"},
            DataError,
            r"png: data\.reader\.patient_pattern=.* no p",
        ),
        ({"patient_pattern": "^p[0-9]+_"}, ConfigError, "patient_pattern=.* has 0 groups"),
        ({"centre_pattern": "(Bern"}, ConfigError, "centre_pattern=.* is no regular expression"),
        (
            {"patient_pattern": "_(B)", "centre_pattern": CENTRE},
            ConfigError,
            r"Patient B has samples at several centres \(Basel, Bern\)",
        ),
        ({"size": (16,)}, ConfigError, r"data\.reader\.size=\[16\] must be a height and a width"),
        (
            {"color": "gray"},
            ConfigError,
            r"color='gray' is unknown; choose grey or rgb",
        ),
    ],
)
def test_bad_settings_are_named(folder, settings, error, message):
    with pytest.raises(error, match=message):
        module(folder, **settings)


def test_from_the_command_line(folder):
    config = load(
        [
            *("data=image_folder", f"data.path={folder}", "model=small_cnn", "partition=centre"),
            *(f'data.reader.centre_pattern="{CENTRE}"', "data.reader.color=rgb"),
        ]
    )
    data, task = data_and_task(describe(config))
    batch = next(data.clients["Bern"].train_batches(0))
    assert batch["image"].shape[1:] == (3, 64, 64)
    assert task(batch["image"]).shape[1:] == (2,)


def split_folder(path, *names):
    """Four images of each of two classes in every split; returns the data's splits by folder."""
    for name in names:
        for kind in ("no_tumor", "glioma"):
            for n in range(4):
                save(pixels(8, 8 + n), path / name / kind / f"{name}_{n}.jpg")
    data = module(path, size=(8, 8))
    ids = {s: [i for p in data.plans.values() for i in p.patients[s]] for s in SPLITS}
    assert data.class_names == ("glioma", "no_tumor")
    assert sum(map(len, ids.values())) == 8 * len(names)
    return data, {s: sorted({i.split("/")[0] for i in of}) for s, of in ids.items()}


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (("Training", "Testing"), {"train": "Training", "val": "Training", "test": "Testing"}),
        (("train", "VALID", "test"), {"train": "train", "val": "VALID", "test": "test"}),
        (("train", "val"), {"train": "train", "val": "val", "test": "train"}),
    ],
)
def test_folders_of_splits_are_the_official_splits(names, folders, tmp_path, caplog):
    caplog.set_level("INFO")
    data, of = split_folder(tmp_path, *names)
    assert of == {split: [folder] for split, folder in folders.items()}
    assert data.settings() == {"splits": "official"}
    assert "are the splits; data.official_splits=false makes others" in caplog.text
    other = ImageDataModule(
        RoundRobin(2),
        partial(read_image_folder, size=(8, 8)),
        path=str(tmp_path),
        official_splits=False,
    )
    other.setup()
    tested = {i.split("/")[0] for p in other.plans.values() for i in p.patients["test"]}
    assert len(tested) > 1


@pytest.mark.parametrize("names", [["test"], ["val"], ["Testing", "validation"]])
def test_folders_of_splits_beside_classes_are_no_classes(names, tmp_path):
    for name in ("benign", "malignant", *names):
        save(pixels(8, 8), tmp_path / name / "1.png")
    with pytest.raises(DataError, match=f"of which {', '.join(sorted(names))} look like splits"):
        read_image_folder(tmp_path)
    taken = read_image_folder(tmp_path, classes=["benign", "malignant"])
    assert taken.classes == ("benign", "malignant")


@pytest.mark.parametrize("kind", ["grey", "grey in three channels", "one in colours"])
def test_colours_that_are_not_read_are_said(kind, tmp_path, caplog):
    for n in range(25):
        grey = np.random.default_rng(n).integers(0, 256, (8, 8, 1), np.uint8)
        image = np.repeat(grey, 1 if kind == "grey" else 3, 2).squeeze()
        if kind == "one in colours" and n % 5 == 0:
            image[..., 0] = 255 - image[..., 0]
        save(image, tmp_path / f"class_{n % 2}" / f"{n}.png")
    read_image_folder(tmp_path, color="rgb")
    assert not caplog.records
    read_image_folder(tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (kind == "one in colours")
    assert all("data.reader.color=rgb reads them" in line for line in lines)


def test_classes_may_be_called_as_splits_are(tmp_path):
    for name in ("test", "train"):
        save(pixels(8, 8), tmp_path / name / "1.png")
    assert read_image_folder(tmp_path, classes=["test", "train"]).classes == ("test", "train")


def test_a_table_of_images_is_the_folder_with_patients_hospitals_and_splits(folder):
    files = sorted(folder.rglob("*.png"))
    rows = ["image;finding;patient;site;split"]
    for file in files:
        patient, site, _ = file.stem.split("_")
        split = "Testing" if patient in ("p2", "p3", "p5", "p8") else "train"
        cells = file.relative_to(folder), file.parent.name, patient, site, split
        rows.append(";".join(map(str, cells)))
    (folder / "list.csv").write_text("\n".join(rows))
    settings = {"size": (16, 16), "label": "finding", "centre": "site"}
    reader = partial(read_image_table, **settings)
    data = ImageDataModule(ByCentre(), reader, path=str(folder / "list.csv"))
    data.setup()
    assert list(data.clients) == ["Basel", "Bern"]
    same = read_image_folder(folder, (16, 16), patient_pattern=PATIENT, centre_pattern=CENTRE)
    found = data.data
    assert np.array_equal(found.images, same.images)
    for name in ("labels", "patients", "centres", "files"):
        assert list(getattr(found.samples, name)) == list(getattr(same.samples, name))
    assert {c: p.patients["test"] for c, p in data.plans.items()} == {
        "Basel": ["p3", "p5"],
        "Bern": ["p2", "p8"],
    }
    assert all(plan.patients["val"] for plan in data.plans.values())
    one = read_image_table(folder / "list.csv", (16, 16), label="site", classes=["Bern", "Basel"])
    assert one.classes == ("Bern", "Basel")
    assert one.samples.labels.tolist() == [c == "Basel" for c in found.samples.centres]


def test_one_picture_of_two_classes_is_said(tmp_path):
    for n, name in enumerate(("a/1", "a/2", "b/3", "b/4")):
        pixels = np.random.default_rng(n % 3).integers(0, 255, (8, 8), np.uint8)
        save(pixels, tmp_path / f"{name}.png")
    data = module(tmp_path)
    what, samples = data.contents()
    found = find_duplicates(what, {"client": {"train": data.data.samples.patients}}, samples)
    assert "(0 over two splits, 0 over two clients, 1 with different labels)" in found.sentence()


def test_one_picture_by_two_paths_is_refused(tmp_path):
    for name in ("1", "2", "3"):
        save(pixels(8, 8), tmp_path / f"{name}.png")
    (tmp_path / "list.csv").write_text("image,label\n1.png,a\n./1.png,b\n3.png,a\n")
    with pytest.raises(DataError, match=r"list\.csv names .*1\.png in two rows; remove one"):
        read_image_table(tmp_path / "list.csv")
