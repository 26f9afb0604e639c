"""One synthetic patient, written in every layout in which BraTS data come."""

import json
from dataclasses import dataclass

import nibabel as nib
import numpy as np

CONTRASTS = ("FLAIR", "T1w", "T1gd", "T2w")
SUFFIXES = {
    "2018": ("_flair", "_t1", "_t1ce", "_t2", "_seg"),
    "2023": ("-t2f", "-t1n", "-t1c", "-t2w", "-seg"),
}
NECROTIC, OEDEMA, ENHANCING = 1, 2, 3  # names of the tissues here, not label values
VALUES = {
    "msd": {NECROTIC: 2, OEDEMA: 1, ENHANCING: 3},
    "2018": {NECROTIC: 1, OEDEMA: 2, ENHANCING: 4},
    "2023": {NECROTIC: 1, OEDEMA: 2, ENHANCING: 3},
}


@dataclass
class Head:
    """Images (4, H, W, D) int16 and tissues (H, W, D), in any orientation."""

    images: np.ndarray
    tissue: np.ndarray
    affine: np.ndarray


def make_head(seed=0, shape=(14, 12, 9), affine=None):
    """A brain in air with a tumour of three nested tissues, off the centre along every axis."""
    rng = np.random.default_rng(seed)
    brain = np.zeros(shape, dtype=bool)
    brain[2:-1, 1:-2, 1:] = True
    images = rng.integers(50, 900, (4, *shape)).astype(np.int16) * brain
    tissue = np.zeros(shape, dtype=np.uint8)
    tissue[3:9, 2:8, 2:7] = OEDEMA
    tissue[4:8, 3:6, 3:6] = ENHANCING
    tissue[5:7, 4:5, 3:5] = NECROTIC
    return Head(images, tissue, np.diag([-1.0, -1, 1, 1]) if affine is None else affine)


def label_values(tissue, convention):
    label = np.zeros_like(tissue)
    for kind, value in VALUES[convention].items():
        label[tissue == kind] = value
    return label


def save(path, array, affine):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, affine), path)


def write_msd(folder, heads):
    for case, head in heads.items():
        save(folder / "imagesTr" / f"{case}.nii.gz", head.images.transpose(1, 2, 3, 0), head.affine)
        label = label_values(head.tissue, "msd")
        save(folder / "labelsTr" / f"{case}.nii.gz", label, head.affine)
    index = {
        "modality": dict(enumerate(CONTRASTS)),
        "training": [
            {"image": f"./imagesTr/{c}.nii.gz", "label": f"./labelsTr/{c}.nii.gz"} for c in heads
        ],
    }
    (folder / "dataset.json").write_text(json.dumps(index))


def write_challenge(folder, heads, convention="2018", ending=".nii.gz"):
    for case, head in heads.items():
        arrays = [*head.images, label_values(head.tissue, convention)]
        for suffix, array in zip(SUFFIXES[convention], arrays, strict=True):
            save(folder / case / f"{case}{suffix}{ending}", array, head.affine)
