"""A hospital without a contrast: trained, evaluated, exported, predicted, and across sites."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import torch

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.run.evaluation import measure_subsets
from medfed.run.finished import reopen_selected
from medfed.run.onboarding import hospital_at, onboard
from medfed.sites.calls import SiteError
from medfed.standalone.errors import DataError
from tests.datamodules.absent_contrasts import write_folders
from tests.integration.runs import IMAGING, run
from tests.sites.direct import Direct
from tests.sites.hospitals import across, same, site

TRAIN = (
    *IMAGING,
    *("data=brats_challenge", "data.reader.channels=[FLAIR,T1w]", "data.patch_size=[8,8]"),
    *("algorithm=fedavg", "algorithm.mask_aware=true", "partition=auto", "augment=light"),
    *("augment.channel_dropout=0.5", "pictures.format=none"),
    "data.reader.missing=zero",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Hospital a has FLAIR of two of three cases, b of none."""
    folder = tmp_path_factory.mktemp("absent")
    data = write_folders(folder / "data", (0, 3, 4, 5))
    run(folder / "run", *TRAIN, f"data.path={data}", f"data.root={folder / 'root'}")
    return folder


def read(path):
    return json.loads(path.read_text())


def test_records_say_who_has_what(trained):
    cohort = read(trained / "run" / "cohort.json")["clients"]
    assert cohort["b"]["removed"] == ["FLAIR"]
    assert "FLAIR in 2 of 3 cases" in cohort["a"]["notes"]
    partition = read(trained / "run" / "splits.json")["partition"]
    assert partition["a"]["channels_of_cases"] == {"FLAIR": [2, 3]}
    assert partition["b"]["channels"] == ["T1w"]


def test_what_reads_a_channel_is_learnt_by_those_who_have_it(trained):
    with (trained / "run" / "ledger.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "scalars"]
    assert {row["client"] for row in rows} == {"b"}


def test_subsets_are_of_cases_that_have_them(trained):
    measured = measure_subsets(trained / "run", "all", "test")
    splits = read(trained / "run" / "splits.json")["clients"]
    lacking = "case_0" in splits["a"]["test"]
    expected = [("T1w",)] if lacking else [("FLAIR",), ("T1w",), ("FLAIR", "T1w")]
    assert list(measured.metrics["a"]) == expected
    assert list(measured.metrics["b"]) == [("T1w",)]
    train = measure_subsets(trained / "run", ["FLAIR+T1w", "T1w"], "train")
    assert list(train.metrics["b"]) == [("T1w",)]


def bundle_of(trained, client):
    keys = [f"run={trained / 'run'}", f"client={client}", f"out={trained / 'bundles'}"]
    there = trained / "bundles" / client
    if not there.exists():
        (there,) = export_run(checked(load(keys, "export")))
    return there


def predicted(bundle, source, output):
    keys = [f"bundle={bundle}", f"input={source}", f"output={output}", "spacing_tolerance=null"]
    predict(checked(load(keys, "predict")))
    with (output / "summary.csv").open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def test_a_bundle_knows_the_contrasts_of_its_hospital(trained, tmp_path):
    a, b = (bundle_of(trained, client) for client in "ab")
    facts = [read(bundle / "configs" / "metadata.json")["medfed"] for bundle in (a, b)]
    assert [f["present"] for f in facts] == [["FLAIR", "T1w"], ["T1w"]]
    assert facts[0]["channels_of_cases"] == {"FLAIR": [2, 3]}
    readme, card = ((a / "docs" / page).read_text() for page in ("README.md", "model_card.md"))
    assert "FLAIR may be missing: 2 of 3 cases of a have it" in readme
    assert "- FLAIR: in 2 of 3 cases" in card
    rows = predicted(a, trained / "data", tmp_path / "a")
    assert {case: row["channels"] for case, row in rows.items()} == {
        f"case_{n}": "T1w" if n in (0, 3, 4, 5) else "FLAIR+T1w" for n in range(6)
    }
    assert "channels" not in next(iter(predicted(b, trained / "data", tmp_path / "b").values()))


def test_cases_in_one_folder_may_lack_it_too(trained, tmp_path):
    (tmp_path / "in").mkdir()
    for n in (0, 1):
        for file in (trained / "data" / f"case_{n}").glob("*_[ft]*.nii.gz"):
            shutil.copy(file, tmp_path / "in")
    rows = predicted(bundle_of(trained, "a"), tmp_path / "in", tmp_path / "out")
    assert {n: row["channels"] for n, row in rows.items()} == {
        "case_0": "T1w",
        "case_1": "FLAIR+T1w",
    }


def test_a_bundle_still_needs_what_all_cases_had(trained, tmp_path):
    case = shutil.copytree(trained / "data" / "case_1", tmp_path / "in" / "case_1")
    (case / "case_1_t1.nii.gz").unlink()
    with pytest.raises(DataError, match=r"0 files match \*_t1\.nii\.gz"):
        predicted(bundle_of(trained, "a"), case, tmp_path / "out")


def at_sites(folder, lacking):
    """The data of each hospital in a folder of its own."""
    whole = write_folders(folder / "whole", lacking)
    for n in range(6):
        shutil.copytree(whole / f"case_{n}", folder / "ab"[n // 3] / f"case_{n}")
    keys, sites = (*TRAIN, f"data.root={folder / 'root'}"), {}
    for name in "ab":
        here = (*keys, f"data.path={folder / name}")
        sites[name] = site(folder / "sites", name, *here, sites=["a", "b"])
    return Direct(sites), keys


def test_sites_may_differ_in_contrasts(trained, tmp_path):
    transport, keys = at_sites(tmp_path, (0, 3, 4, 5))
    across(tmp_path / "run", transport, ["a", "b"], *keys, f"data.path={tmp_path / 'a'}")
    assert same(trained / "run", tmp_path / "run") == []


def test_a_contrast_that_no_site_has_is_a_typing_error(tmp_path):
    transport, keys = at_sites(tmp_path, range(6))
    with pytest.raises(SiteError, match=r"No site has a file of FLAIR; mend its name or pattern"):
        across(tmp_path / "run", transport, ["a", "b"], *keys, f"data.path={tmp_path / 'a'}")


def test_zeros_are_filled_after_augmentation(trained):
    client = reopen_selected(trained / "run").data.clients["a"]
    for batch in client.train_batches(0):
        absent = ~batch["channels"]
        assert not batch["image"][absent].any()
        assert torch.equal(batch["channels"].any(1), torch.ones(len(absent), dtype=torch.bool))


def test_a_hospital_that_joins_later_may_lack_it(trained, tmp_path):
    data = write_folders(tmp_path / "c", range(3), cases=3)
    assert hospital_at(reopen_selected(trained / "run"), data).channels.tolist() == [False, True]
    found = onboard(trained / "run", str(data), [1], steps=1)
    assert {row.client for row in found.rows} == {"c"}


def test_a_saved_partition_reads_the_contrasts_again(trained, tmp_path):
    splits = trained / "run" / "splits.json"
    keys = [k for k in TRAIN if not k.startswith("partition=")]
    where = (f"data.path={trained / 'data'}", f"data.root={tmp_path / 'root'}")
    run(tmp_path / "run", *keys, *where, "partition=saved", f"partition.file={splits}")
    assert same(trained / "run", tmp_path / "run") == []
