"""Small CT volumes with two organs, in the layouts that the readers of any volumes take."""

from __future__ import annotations

import json

import numpy as np

from tests.datamodules.volume_files import affine, write_volume

LABELS = {"0": "background", "1": "liver", "2": "tumour"}


def organs(seed=0, shape=(20, 18, 8)):
    """HU and label values: fat in air, a liver in it, a tumour in that."""
    rng = np.random.default_rng(seed)
    hounsfield = np.full(shape, -1000, np.int16)
    label = np.zeros(shape, np.uint8)
    hounsfield[3:-3, 3:-3] = -90
    hounsfield[5:14, 5:13, 2:7] = 100
    label[5:14, 5:13, 2:7] = 1
    hounsfield[7:10, 7:10, 3:6] = 40
    label[7:10, 7:10, 3:6] = 2
    return (hounsfield + rng.integers(-20, 20, shape)).astype(np.int16), label


def write_datalist(folder, cases=6, *, suffix=".nii.gz", index=(), entry=lambda n: {}, mm=None):
    """``dataset.json`` as MSD has it; `entry` adds to the n-th case's, `index` to the whole."""
    listed = []
    for n in range(cases):
        image, label = organs(n)
        to_mm = affine(mm or (2.0, 2.0, 5.0))
        name = f"organ_{n:02d}"
        write_volume(folder / "imagesTr" / f"{name}{suffix}", image, to_mm)
        mask = suffix or ".nii.gz"  # of a DICOM series as a file
        write_volume(folder / "labelsTr" / f"{name}{mask}", label, to_mm)
        files = {"image": f"./imagesTr/{name}{suffix}", "label": f"./labelsTr/{name}{mask}"}
        listed.append({**files, **entry(n)})
    content = {"modality": {"0": "CT"}, "labels": LABELS, "training": listed, **dict(index)}
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def write_nnunet(folder, cases=6, channels=("CT",), labels=None, ending=".nii.gz"):
    for n in range(cases):
        image, label = organs(n)
        for c in range(len(channels)):
            path = folder / "imagesTr" / f"organ_{n:02d}_{c:04d}{ending}"
            write_volume(path, image + np.int16(c), affine())
        write_volume(folder / "labelsTr" / f"organ_{n:02d}{ending}", label, affine())
    content = {
        "channel_names": {str(c): name for c, name in enumerate(channels)},
        "labels": labels or {"background": 0, "liver": 1, "tumour": 2},
        "numTraining": cases,
        "file_ending": ending,
    }
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder
