"""Our rules of planning give nnU-Net's plans; `make_nnunet_plans` says how they were made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from medfed.functional.planning import Fingerprint, Planner
from medfed.standalone.errors import ConfigError

FIXTURE = json.loads(Path(__file__).with_name("nnunet_plans.json").read_text("utf-8"))
CASES = FIXTURE["fingerprints"]


def fingerprint(spacings, shapes):
    mm, voxels = np.array(spacings, dtype=float), np.array(shapes, dtype=float)
    return Fingerprint(mm, voxels, mm * voxels)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one["name"].replace(" ", "_"))
def test_plans_are_nnunets(one):
    cases = fingerprint(one["spacings"], one["shapes"])
    for wanted in one["plans"]:
        planner = Planner(one["channels"], one["labels"], wanted["residual"], wanted["memory_gb"])
        got = planner.plan(cases, wanted["configuration"]).record()
        axes = wanted["axes"]
        if wanted["configuration"] == "2d":  # within the slice, in the order of the cases
            axes = [axis - (axis > axes[0]) for axis in axes[1:]]
        for key in ("patch_size", "strides", "kernel_sizes", "spacing"):
            rows = got[key] if isinstance(got[key][0], list) else [got[key]]
            rows = [[row[axis] for axis in axes] for row in rows]
            got[key] = rows if isinstance(got[key][0], list) else rows[0]
        assert got.pop("spacing") == pytest.approx(wanted["spacing"], rel=1e-12)
        expected = {key: value for key, value in wanted.items() if key in got}
        assert {key: got[key] for key in expected} == expected
        assert len(expected) == 9


def test_the_fixture_holds_what_it_claims():
    plans = [plan for one in CASES for plan in one["plans"]]
    assert len(CASES) >= 30
    assert {p["configuration"] for p in plans} == {"2d", "3d_fullres", "3d_lowres"}
    assert {p["residual"] for p in plans} == {None, "M", "L"}
    assert sum("thin-slice CT" in one["name"] for one in CASES) == 4
    assert len({tuple(p["axes"]) for p in plans}) == 3
    assert FIXTURE["made_by"]["nnunetv2"]


def test_what_has_no_plan_is_refused():
    slices = fingerprint([[1.0, 1.0, 1.0]], [[1, 64, 64]])
    with pytest.raises(ConfigError, match="single slices"):
        Planner(1, 2).plan(slices, "3d_fullres")
    small = fingerprint([[1.0, 1.0, 1.0]], [[32, 32, 32]])
    with pytest.raises(ConfigError, match="no plan of low resolution"):
        Planner(1, 2).plan(small, "3d_lowres")
    with pytest.raises(ConfigError, match="memory_gb=1e-06 is too small"):
        Planner(1, 2, memory_gb=1e-6).plan(small, "3d_fullres")


def test_what_the_user_sets_wins_and_the_rest_fits_it():
    cases = fingerprint([[5.0, 0.8, 0.8]] * 9, [[60, 300, 300]] * 9)
    plan = Planner(1, 2, spacing=[4.0, 1.0, 1.0], patch_size=[16, 64, 32], batch_size=7).plan(
        cases, "3d_fullres"
    )
    assert (plan.spacing, plan.patch_size, plan.batch_size) == ((4.0, 1.0, 1.0), (16, 64, 32), 7)
    assert plan.strides[1] == (1, 2, 2)
    flat = Planner(1, 2, axial=True, spacing=[2.0, 1.0]).plan(cases, "2d")
    assert flat.spacing == (2.0, 1.0)
    with pytest.raises(ConfigError, match=r"must be a multiple of \[1, 4, 4\]"):
        Planner(1, 2, patch_size=[5, 18, 16]).plan(cases, "3d_fullres")
