"""Composition, explanation and checks of the configuration."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import monai
import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

from medfed.config.check import check_types
from medfed.config.compose import CONFIG_DIR, build, changed_keys, load
from medfed.config.description import checked, resolved
from medfed.config.sections import targets, walk
from medfed.federation.algorithm import Cohort
from medfed.federation.budget import LocalBudget
from medfed.standalone.checks import check_positive
from medfed.standalone.errors import ConfigError
from tests.checking import check_overrides

EXPERIMENTS = sorted(p.stem for p in (CONFIG_DIR / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    # An experiment on data that cannot be generated leaves their path to the user; data that are
    # generated only have none.
    config = load([f"experiment={experiment}", "folder=nowhere", "++data.path=.", "init.weights=."])
    checked(config)
    assert isinstance(build(config.local), LocalBudget)
    assert isinstance(build(config.cohort), Cohort)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("expriment=x", r"Unknown key 'expriment' \(did you mean"),
        ("experiment=brats", r"Unknown experiment 'brats' \(did you mean .*brats_pfednet"),
        ("optimizer=sdg", r"Unknown optimizer 'sdg' \(did you mean sgd"),
        ("optimizer.learning_rate=1", r"optimizer has lr, momentum, weight_decay, nesterov"),
        ("model.network.depth.x=1", r"model\.network has "),
        ("cohort=all", r"cohort=all would replace a whole section; set one of its keys"),
        ("algorithm.graph.kind", r"The command line cannot be read|is no override"),
    ],
)
def test_mistakes_are_explained(override, message):
    with pytest.raises(ConfigError, match=message):
        check_overrides([override])


@pytest.mark.parametrize("another", ["local.stepz=3", "local.steps=1 local.epochs=null"])
def test_beside_another_mistake_an_unknown_key_is_explained_too(another):
    key = "optimizer.learning_rate=1"
    for line in ([key, *another.split()], [*another.split(), key]):
        with pytest.raises(ConfigError, match=r"^Unknown key|^local\.epochs changes nothing"):
            check_overrides(line)


def test_a_word_is_refused_wherever_a_number_or_yes_or_no_stands():
    """Over all keys of a composed run: none is beyond constructors and the table of keys."""
    values = walk(OmegaConf.to_container(load(), resolve=False))
    for key in [key for key, value in values if isinstance(value, bool | int | float)]:
        word = f"{key}=yesplease"
        with pytest.raises(ConfigError, match=re.escape(key)):
            checked(load([word]), (word,))


def test_every_value_of_a_sweep_is_checked():
    check_overrides(["-m", "algorithm=fedavg,local", "seed=range(0,3)"])
    with pytest.raises(ConfigError, match=r"Unknown algorithm 'fedagv' \(did you mean fedavg"):
        check_overrides(["-m", "seed=0,1", "algorithm=local,fedagv"])


def test_codecs_are_chosen_by_their_place():
    plain = load(["codec.up=stc", "codec.up.sparsity=0.1"])
    assert plain == load(["codec@codec.up=stc", "codec.up.sparsity=0.1"])
    assert (plain.codec.up.sparsity, plain.codec.down.dtype) == (0.1, "float32")
    swept = check_overrides(["-m", "codec.up=fp32,stc", "codec.down=stc"])
    assert [c.codec.up._target_.rsplit(".", 1)[1] for c in swept] == ["Dense", "STC"]
    with pytest.raises(ConfigError, match=r"Unknown codec 'stcc' \(did you mean stc"):
        check_overrides(["-m", "codec.up=fp32,stcc"])


def test_an_optimizer_or_schedule_may_be_written_out():
    written = "optimizer={_target_: torch.optim.RMSprop, lr: 0.02, alpha: 0.9}"
    found = load(["experiment=clinical_pfednet", written])
    assert dict(found.optimizer) == {
        "_target_": "torch.optim.RMSprop",
        "_partial_": True,
        "lr": 0.02,
        "alpha": 0.9,
    }
    stepped = "scheduler={_target_: torch.optim.lr_scheduler.MultiStepLR, milestones: [5, 9]}"
    assert load([stepped]).scheduler.milestones == [5, 9]
    with pytest.raises(ConfigError, match=r"optimizer\._target_ has no value yet; name what to"):
        check_overrides(["optimizer=own"])


COHORT = {"_target_": "medfed.federation.algorithm.Cohort"}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({**COHORT, "fraction": "x"}, r"part\.fraction must be a number, not 'x'\."),
        ({**COHORT, "fraction": True}, r"part\.fraction must be a number, not True\."),
        ({**COHORT, "fraction": None}, r"part\.fraction must be a number, not None\."),
        ({**COHORT, "fraction": 2}, r"part\.fraction must be in"),
        ({**COHORT, "share": 1}, r"part cannot be used as it is: .*unexpected keyword .*'share'"),
        (
            {"_target_": "medfed.nothing.Here"},
            r"part\._target_=medfed\.nothing\.Here is nothing",
        ),
    ],
)
def test_constructors_are_explained(node, message):
    with pytest.raises(ConfigError, match=message):
        build(OmegaConf.create({"part": node}).part)


class Base:
    def __init__(self, size: int = 1, note: str = "") -> None: ...


class HandsOn(Base):
    def __init__(self, rate: Annotated[float, check_positive] = 1.0, **more: Any) -> None: ...


class TakesLess(Base):
    def __init__(self, note="") -> None: ...  # whoever leaves the type out takes anything


@dataclass
class Parts:
    sizes: Sequence[int] = ()
    kind: Literal["a", "b"] | Sequence[float] | None = None
    absent: Mapping[int, Sequence[str]] | None = None
    shares: Mapping[str, float] | None = None
    network: nn.Module | None = None
    rate: float | Tensor = 0.1


@dataclass
class MoreParts(Parts):
    window: Sequence[int] | Sequence[Sequence[int]] = ()
    later: "Unknown" = None  # noqa: F821


REFUSED = [
    (Base, "size", "many", "must be a whole number, not 'many'."),
    (Base, "size", True, "must be a whole number, not True."),
    (HandsOn, "size", 1.5, "must be a whole number, not 1.5."),
    (HandsOn, "rate", "x", "must be a number, not 'x'."),
    (HandsOn, "rate", -1, "must be positive, not -1."),
    (Parts, "sizes", "a", "must be a list, not 'a'; write part.sizes=[a]."),
    (Parts, "kind", "c", "='c' is unknown; choose one of a, b, null."),
    (Parts, "kind", [0.5, "x"], "[1] must be a number, not 'x'."),
    (Parts, "shares", {"a": "x"}, "each value in part.shares must be a number, not {'a': 'x'}."),
    (Parts, "shares", 3, "must be a map or null, not 3."),
    (Parts, "rate", "half", "must be a number, not 'half'."),
    (
        LocalBudget,
        "graphs",
        "on",
        "='on' is unknown; choose one of auto, true, false.",
    ),
    (torch.optim.SGD, "lr", "half", "must be a number, not 'half'."),
    (torch.optim.SGD, "nesterov", 1, "must be true or false, not 1."),
    (monai.networks.nets.UNet, "strides", [2, "x"], "[1] must be a whole number, not 'x'."),
]
TAKEN = [
    (HandsOn, "note", "any"),
    (TakesLess, "size", "the constructor says that it takes none"),
    (TakesLess, "note", 3),
    (Parts, "kind", "a"),
    (Parts, "kind", [1, 2.5]),
    (Parts, "absent", [[3, ["a"]]]),  # pairs for a map
    (Parts, "network", {"_target_": "torch.nn.ReLU"}),
    (Parts, "network", "the constructor judges it"),
    (Parts, "rate", 1),
    (Parts, "sizes", "${rounds}"),
    (MoreParts, "window", [[1], [2]]),
    (MoreParts, "later", 3),
    (torch.optim.Adam, "betas", [0.9, 0.99]),
    (Base, "size", np.int64(3)),
]


@pytest.mark.parametrize(("kind", "name", "value", "sentence"), REFUSED)
def test_a_value_of_another_type_is_named(kind, name, value, sentence):
    node = {"_target_": f"{kind.__module__}.{kind.__name__}", name: value}
    with pytest.raises(ConfigError) as caught:
        check_types(targets({"part": node}))
    start = "" if sentence.startswith("each") else f"part.{name}"
    assert str(caught.value) in (f"{start}{sentence}", f"{start} {sentence}")


@pytest.mark.parametrize(("kind", "name", "value"), TAKEN)
def test_what_only_a_constructor_can_judge_is_left_to_it(kind, name, value):
    check_types(
        [("part._target_", {"_target_": f"{kind.__module__}.{kind.__name__}", name: value})]
    )


def test_only_what_is_set_is_imported():
    node = {"_target_": "nowhere.Thing", "size": "many"}
    whole = {"a": {"_target_": f"{__name__}.Base", "size": "many"}, "b": node}
    check_types(targets(whole), ["b.size", "a.note", "a.siz"])
    for key in ("a.size", "a"):
        with pytest.raises(ConfigError, match=r"^a\.size must be a whole number"):
            check_types(targets(whole), [key])


def test_good_values_pass():
    assert build(OmegaConf.create({**COHORT, "fraction": 1})) == Cohort()
    assert build(OmegaConf.create({**COHORT, "clients": ["a"], "_convert_": "all"})).clients == [
        "a"
    ]
    with pytest.raises(ConfigError, match="'x' stands where the configuration needs a section"):
        build("x")


def test_changed_keys_name_additions_and_removals():
    old = OmegaConf.create({"a": {"b": 1}, "list": [1, 2], "gone": 0})
    new = OmegaConf.create({"a": {"b": 1}, "list": [1, 3], "new": 0})
    assert changed_keys(old, new) == ["gone: 0 -> None", "list: [1, 2] -> [1, 3]", "new: None -> 0"]
    assert changed_keys(old, old) == []


@pytest.mark.parametrize("key", ["b.d.y", "h.x.y"])
def test_a_value_in_the_place_of_a_map_is_no_absent_key(key):
    plain = {"b": {"d": [1, "x"]}, "h": "t", "x": f"${{oc.select:{key},1}}"}
    with pytest.raises(ConfigError, match=r"^x cannot .*: \S+=.* stands where keys such as "):
        resolved(plain)
    assert resolved({**plain, "x": "${oc.select:none.y,1}"})["x"] == 1


@pytest.mark.parametrize(
    "path", sorted((CONFIG_DIR / "algorithm").glob("*.yaml")), ids=lambda p: p.stem
)
def test_no_plain_value_of_a_method_is_a_part_to_build(path):
    """A class in the place of a number is named before anything is built."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    plain = [n for n, v in content.items() if isinstance(v, int | float) and n[0] != "_"]
    for name in plain:
        part = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
        section = {"algorithm": {**content, name: part}}
        with pytest.raises(ConfigError, match=rf"algorithm.{name} takes a plain value"):
            check_types(targets(section))
