"""What the tests remember of Hydra is what Hydra composes."""

from __future__ import annotations

import importlib
import sys

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from medfed.config import allowed
from medfed.config import compose as composer
from medfed.config.allowed import CONFIG_DIR
from medfed.config.compose import compose_all, load
from medfed.config.spelling import with_plugins
from medfed.standalone.errors import ConfigError
from tests import composing
from tests.contract.names import experiment_yamls

OVERRIDES = (
    ("algorithm=ditto", "seed=3", "algorithm.strength=0.5"),
    ("codec.up=stc", "channel.up.cer.gamma=0.1", "+local.clip=1", "hydra.run.dir=/tmp/a b"),
    ("optimizer=adamw", "~scheduler", "data.batch_size=7", "name='x,y'"),
)


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda words: words[0])
@pytest.mark.parametrize("experiment", sorted(experiment_yamls()))
def test_remembered_configurations_are_hydras(experiment, overrides, monkeypatch):
    words, both = (f"experiment={experiment}", *overrides), []
    for compose in (composing.remembered, hydra.compose):
        monkeypatch.setattr(composer, "compose", compose)
        try:
            config = composer._composed(list(words), "train").config
            both.append(OmegaConf.to_container(config, resolve=False))
        except ConfigError as error:
            both.append(str(error))
    assert both[0] == both[1]


def test_a_configuration_that_is_changed_changes_no_other():
    first = load(["experiment=brats_pfednet"])
    first.seed = 99
    assert load(["experiment=brats_pfednet"]).seed != 99


def test_a_plugin_yaml_with_a_shipped_name_is_refused_unless_it_is_a_copy(tmp_path):
    copied = tmp_path / "configs" / "model" / "small_cnn.yaml"
    copied.parent.mkdir(parents=True)
    copied.write_bytes((allowed.CONFIG_DIR / "model" / "small_cnn.yaml").read_bytes())
    with_plugins([f"plugins={tmp_path}"])
    copied.write_text("_target_: mine.Net\n")
    with pytest.raises(ConfigError, match=r"small_cnn.yaml has the name of medfed's own"):
        with_plugins([f"plugins={tmp_path}"])


def edited(folder):
    """A longer text, so that no clock decides whether it is another."""
    (folder / "plugged.py").write_text("from plugged_helper import WIDTH\n\nWIDTH += 100\n")
    return folder


def edited_helper(folder):
    (folder / "plugged_helper.py").write_text("WIDTH = 30000\n")
    return folder


def copied_folder(folder):
    other = folder.parent / "other"
    other.mkdir()
    (other / "plugged.py").write_text("WIDTH = 7\n")
    return other


def unchanged(folder):
    return folder


WIDTHS = {edited: 103, edited_helper: 30000, copied_folder: 7, unchanged: 3}


@pytest.mark.parametrize("change", WIDTHS, ids=lambda change: change.__name__)
def test_a_plugin_is_imported_as_it_is_on_disk_when_it_is_named(change, tmp_path, monkeypatch):
    """As in a notebook, which trains, edits a module or copies its folder, and trains again."""
    for name in ("_active", "_imported"):
        monkeypatch.setattr(allowed, name, type(getattr(allowed, name))())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "plugged.py").write_text("from plugged_helper import WIDTH\n")
    (folder / "plugged_helper.py").write_text("WIDTH = 3\n")
    try:
        with_plugins([f"plugins={folder}"])
        first = importlib.import_module("plugged")
        assert first.WIDTH == 3
        with_plugins([f"plugins={change(folder)}"])
        second = importlib.import_module("plugged")
        assert WIDTHS[change] == second.WIDTH
        assert (first is second) == (change is unchanged)
    finally:
        for name in ("plugged", "plugged_helper"):
            sys.modules.pop(name, None)


OF_COMMANDS = [f.stem for f in CONFIG_DIR.glob("*.yaml") if f.stem not in ("train", "deploy")]


@pytest.mark.parametrize("command", OF_COMMANDS)
def test_the_folder_of_a_run_is_that_of_every_command_that_writes_one(command):
    keys = yaml.safe_load((CONFIG_DIR / f"{command}.yaml").read_text())
    place = next((key for key in ("out", "output", "folder") if key in keys), None)
    if place is None:
        assert command == "evaluate"  # writes into the run
        return
    (composed,) = compose_all(["hydra.run.dir=/a/b"], command)
    assert composed.config[place] == "/a/b"
