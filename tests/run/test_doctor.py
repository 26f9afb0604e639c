"""What ``medfed doctor`` tells is so, and what is wrong is one sentence with what mends it."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from medfed.commands import doctor as command
from medfed.run import doctor


def test_the_report_ends_with_what_is_wrong(capsys):
    command.main([])
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("Nothing is wrong.")
    assert {what for what, _ in doctor.extras()} == {f"medfed[{e}]" for e in doctor.EXTRAS}


def test_every_extra_of_the_package_is_explained():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert {*project["project"]["optional-dependencies"]} - {"dev"} == {*doctor.EXTRAS}


def test_a_wrong_installation_is_a_sentence_each(monkeypatch, tmp_path):
    needed = ["torch<1", "no-such-package>=2", 'numpy>=1; extra == "x"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    monkeypatch.setattr(doctor, "driver", lambda: "550.1")
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    old, missing, gpu = doctor.mistakes(tmp_path)
    assert "<1 is needed: pip install 'torch<1'." in old
    assert missing == "no-such-package is not installed: pip install 'no-such-package>=2'."
    assert "driver, 550.1, but PyTorch" in gpu
    assert doctor.wrong_packages("x") == []


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    told = [s for s in doctor.mistakes(tmp_path) if "cannot write to" in s]
    assert len(told) == 3
    assert told[0] == (
        f"medfed cannot write to {tmp_path}/outputs: choose another folder by hydra.run.dir=FOLDER."
    )
