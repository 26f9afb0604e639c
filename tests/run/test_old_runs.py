"""Run folders of medfed 0.1, whose configurations name classes by where they were."""

from __future__ import annotations

import json
import shutil

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from medfed.commands.prepare import main
from medfed.common.errors import MedfedError
from medfed.config.compose import CONFIG_DIR, load
from medfed.config.old_names import relocate, renamed
from medfed.run.evaluation import evaluate_run
from tests.integration.runs import CLINICAL, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose configuration is written as 0.1 wrote it."""
    folder = tmp_path_factory.mktemp("old") / "run"
    run(folder, *CLINICAL, "codec.up=stc", "keep_out=[hospital_1]")
    path = folder / "config.yaml"
    text, before = path.read_text(), {new: old for old, new in renamed().items()}
    for new in sorted(before, key=len, reverse=True):
        text = text.replace(f"_target_: {new}\n", f"_target_: {before[new]}\n")
    assert "  normalization: minmax\n" in text
    text = text.replace("  normalization: minmax\n", "")  # the only one that 0.1 had
    text = text.replace("plugins: null\n", "").replace("\nkeep_out:", "\nnewcomers:")
    assert "newcomers:\n- hospital_1" in text
    assert "medfed.federation.codecs.STC" in text
    path.write_text(text)
    return folder


@pytest.mark.parametrize(("old", "new"), [c for c in renamed().items() if "." in c[0]])
def test_every_new_name_is_there_and_no_old_one_is(old, new):
    get_object(new)
    with pytest.raises(Exception, match=r"(No module|not found|Error)"):
        assert callable(get_object(old)), "Error: a module of that name"


def test_an_old_run_reopens(folder):
    kept = json.loads((folder / "summary.json").read_text())
    again = evaluate_run(folder)
    assert again["clients"] == kept["clients"]
    assert "hospital_1" not in again["clients"]


def test_what_is_no_more_is_refused_in_one_sentence(folder, tmp_path):
    foreign = tmp_path / "run"
    shutil.copytree(folder, foreign)
    config = OmegaConf.load(foreign / "config.yaml")
    config.algorithm._target_ = "medfed.personalize.nowhere.Nothing"
    OmegaConf.save(config, foreign / "config.yaml")
    with pytest.raises(MedfedError) as caught:
        evaluate_run(foreign)
    assert "\n" not in str(caught.value)
    assert "nowhere" in str(caught.value)


def test_a_user_s_yaml_may_name_what_was(tmp_path, capsys):
    text = (CONFIG_DIR / "data" / "brats_folder.yaml").read_text()
    new = "medfed.datamodules.segmentation.SegmentationDataModule"
    assert new in text
    (tmp_path / "configs" / "data").mkdir(parents=True)
    old = text.replace(new, "medfed.datamodules.brats.BratsDataModule")
    (tmp_path / "configs" / "data" / "mine.yaml").write_text(old)
    plugin = f"plugins={tmp_path}"
    assert load([plugin, "data=mine"]).data._target_ == new
    with pytest.raises(SystemExit):  # by the command, whose Hydra composes once more
        main([plugin, "data=mine", f"data.path={tmp_path / 'configs'}", f"data.root={tmp_path}"])
    assert "FLAIR" in capsys.readouterr().err  # the reader looks for its files


def test_names_in_lists_are_replaced_too():
    node = OmegaConf.create({"a": [{"_target_": "medfed.federation.link.Link"}], "b": "${a}"})
    relocate(node)
    assert node.a[0]._target_ == "medfed.federation.wire.link.Link"
