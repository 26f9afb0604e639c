"""What the data modules say about how they treat a scan, against the files themselves."""

import json
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medfed.config.compose import build, load
from medfed.standalone.volumes import read_geometry
from tests.sweeps import sweep

TINY = {
    "brats": [
        "data.generated.patients=3",
        "data.generated.shape=[24,24,8]",
        "data.patch_size=[16,16]",
    ],
    "brats_3d": [
        *("data=brats", "data.spatial_dims=3", "data.patch_size=[16,16,8]"),
        *("data.generated.patients=3", "data.generated.shape=[24,24,8]"),
    ],
    "luna16": ["data.generated.patients=3", "data.generated.shape=[32,32,16]"],
    "breast_cancer": [],
    "mixture": ["data.clients=3", "data.features=4"],
    "digits": [],
}


def of(name, root, partition=None):
    common = [f"data={name.partition('_3d')[0]}", *TINY[name]]
    rooted = [] if name in ("breast_cancer", "mixture", "digits") else [f"data.root={root}"]
    usual = "round_robin" if name in ("breast_cancer", "digits") else "centre"
    config = load([*common, *rooted, f"partition={partition or usual}"])
    data = build(config.data)
    data.setup()
    return data


@pytest.mark.parametrize("name", sorted(TINY))
def test_it_is_json_and_names_every_channel_and_class(name, tmp_path_factory):
    data = of(name, tmp_path_factory.getbasetemp() / "root")
    for client, plan in data.plans.items():
        found = data.preprocessing(client)
        assert json.loads(json.dumps(found)) == found
        assert (found["channels"], found["labels"]) == (
            list(data.channel_names),
            list(data.class_names),
        )
        assert len(found["present"]) == int(plan.channels.sum())
        assert found["input"]["kind"] in ("volumes", "ct_patches", "images", "table")


def test_a_client_names_the_channels_that_it_has(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "root"
    data = of("brats", root, partition="channel_missing")
    assert data.preprocessing("hospital_1")["present"] == ["FLAIR", "T1gd", "T2w"]


@sweep("codes", ["RAS", "LPI", "SAR", "PIL"])
def test_spacing_is_along_the_patient_axes(codes, tmp_path):
    towards_ras = np.diag([1.0, 2.0, 3.0, 1.0])  # mm to the right, to the front, to the head
    image = nib.Nifti1Image(np.zeros((4, 5, 6), np.uint8), towards_ras)
    turn = nib.orientations.ornt_transform(
        nib.io_orientation(towards_ras), nib.orientations.axcodes2ornt(codes)
    )
    nib.save(image.as_reoriented(turn), tmp_path / "turned.nii.gz")
    assert read_geometry(tmp_path / "turned.nii.gz").spacing == pytest.approx((1.0, 2.0, 3.0))


def test_spacing_of_the_training_scans_alone(tmp_path_factory):
    data = of("luna16", tmp_path_factory.getbasetemp() / "root")
    for client, plan in data.plans.items():
        found = data.preprocessing(client)
        files = [data.patients[i].files["header"] for i in plan.patients["train"]]
        spacings = np.array([sitk.ReadImage(str(f)).GetSpacing() for f in files])
        np.testing.assert_allclose(found["spacing_range"][0], spacings.min(axis=0), rtol=1e-6)
        np.testing.assert_allclose(found["spacing_range"][1], spacings.max(axis=0), rtol=1e-6)
        np.testing.assert_allclose(found["spacing"], np.median(spacings, axis=0), rtol=1e-6)


def test_ranges_of_the_training_rows_alone():
    data = of("breast_cancer", None)
    table, samples = data.table, data.samples
    for client, plan in data.plans.items():
        rows = [r for p in plan.patients["train"] for r in samples.rows[p]]
        found = data.preprocessing(client)["normalization"]
        assert found["minimum"] == table.features[rows].min(axis=0).tolist()
        assert found["maximum"] == table.features[rows].max(axis=0).tolist()


def test_labels_stand_in_the_order_of_a_clients_own_network():
    data = of("digits", None)
    client, other = list(data.plans)[:2]
    order = (1, 2, 0, *range(3, 10))  # it calls class 0 "1", class 1 "2" and class 2 "0"
    data.plans[client] = replace(data.plans[client], label_order=order)
    assert data.preprocessing(client)["labels"][:4] == ["2", "0", "1", "3"]
    assert data.preprocessing(other)["labels"][:4] == ["0", "1", "2", "3"]
