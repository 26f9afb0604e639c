"""Composition, explanation and checks of the configuration."""

import pytest
from omegaconf import OmegaConf

from medfed.common.errors import ConfigError
from medfed.config.compose import CONFIG_DIR, build, changed_keys, load
from medfed.config.description import checked
from medfed.federation.algorithm import Cohort
from medfed.federation.budget import LocalBudget
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
