"""Cases of two contrasts, some without a file for FLAIR, in every layout of volumes."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import SimpleITK as sitk

from medfed.datamodules.readers.case_folders import BratsChallengeReader, FolderReader
from medfed.datamodules.readers.datalist import DatalistReader, NnunetReader
from tests.datamodules.brats_layouts import make_head, save
from tests.datamodules.volume_files import unchanged_locale

CHANNELS = ("FLAIR", "T1w")
LABELS = {"background": 0, "tumour": 1}


def write_folders(folder, lacking, cases=6):
    """A folder per case, as BraTS has it; hospital a has the first half of the cases."""
    for n in range(cases):
        head, case = make_head(n), f"case_{n}"
        for suffix, image in zip(("_flair", "_t1"), head.images, strict=False):
            if suffix == "_t1" or n not in lacking:
                save(folder / case / f"{case}{suffix}.nii.gz", image, head.affine)
        tumour = (head.tissue > 0).astype(np.uint8)
        save(folder / case / f"{case}_seg.nii.gz", tumour, head.affine)
    _write_centres(folder, [f"case_{n}" for n in range(cases)])
    return folder


def write_list(folder, lacking, cases=6, listed=None):
    """A JSON list; `listed` is what stands for an absent file, its name if there is none."""
    entries = []
    for n in range(cases):
        head, names = make_head(n), [f"images/case_{n}_{c}.nii.gz" for c in CHANNELS]
        for name, image in zip(names, head.images, strict=False):
            if "T1w" in name or n not in lacking:
                save(folder / name, image, head.affine)
        if n in lacking and listed:
            names[0] = json.loads(listed)
        mask = f"labels/case_{n}.nii.gz"
        save(folder / mask, (head.tissue > 0).astype(np.uint8), head.affine)
        entries.append({"image": names, "label": mask, "centre": "ab"[2 * n // cases]})
    _write_index(folder, {"modality": dict(enumerate(CHANNELS)), "training": entries})
    return folder


def write_nnunet(folder, lacking, cases=6):
    for n in range(cases):
        head = make_head(n)
        for c, image in enumerate(head.images[:2]):
            if c or n not in lacking:
                save(folder / "imagesTr" / f"case_{n}_{c:04d}.nii.gz", image, head.affine)
        tumour = (head.tissue > 0).astype(np.uint8)
        save(folder / "labelsTr" / f"case_{n}.nii.gz", tumour, head.affine)
    _write_index(folder, {"channel_names": dict(enumerate(CHANNELS))})
    _write_centres(folder, [f"case_{n}" for n in range(cases)])
    return folder


def write_dicom(folder, lacking, cases=6):
    """A folder per case with a DICOM series per contrast; an absent one is an empty folder."""
    for n in range(cases):
        head, case = make_head(n), folder / f"case_{n}"
        for c, name in enumerate(CHANNELS):
            (case / name).mkdir(parents=True)
            if c or n not in lacking:
                _write_series(case / name, head.images[c], f"1.2.3.{n}.{c}")
        tumour = sitk.GetImageFromArray((head.tissue > 0).astype(np.uint8).transpose(2, 1, 0))
        sitk.WriteImage(tumour, str(case / "mask.nii.gz"))
    _write_centres(folder, [f"case_{n}" for n in range(cases)])
    return folder


@unchanged_locale()
def _write_series(folder, image, uid):
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for k in range(image.shape[2]):
        plane = sitk.GetImageFromArray(np.ascontiguousarray(image[..., k].T))
        facts = {"0008|0018": f"{uid}.{k}", "0020|000e": uid, "0008|0060": "MR"}
        place = {"0020|0032": f"0\\0\\{k}", "0020|0037": "1\\0\\0\\0\\1\\0", "0020|0013": str(k)}
        for tag, value in (facts | place).items():
            plane.SetMetaData(tag, value)
        writer.SetFileName(str(folder / f"{k:03d}.dcm"))
        writer.Execute(plane)


def _write_centres(folder, cases):
    centres = {case: "ab"[2 * n // len(cases)] for n, case in enumerate(cases)}
    (folder / "centres.json").write_text(json.dumps(centres))


def _write_index(folder, content):
    index = {"labels": LABELS, **content}
    (folder / "dataset.json").write_text(json.dumps(index))


BRATS = partial(BratsChallengeReader, channels=CHANNELS)
FOLDERS = partial(
    FolderReader,
    modalities={c: c for c in CHANNELS},
    label="mask.nii.gz",
    regions={"tumour": [1]},
)
LAYOUTS = {
    "case folders": (write_folders, BRATS),
    "list": (write_list, DatalistReader),
    "list with null": (partial(write_list, listed="null"), DatalistReader),
    "nnU-Net": (write_nnunet, NnunetReader),
    "DICOM": (write_dicom, FOLDERS),
}
