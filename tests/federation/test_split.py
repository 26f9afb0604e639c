from dataclasses import replace

import pytest
import torch
from torch import nn

from medfed.federation.split import (
    ParameterSplit,
    float_entries,
    match,
    normalization_patterns,
    of_one_sample,
)
from medfed.personalize.fedala import FedALA
from medfed.personalize.fedpac import FedPAC
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedphp import FedPHP
from medfed.personalize.fedproto import FedProto
from medfed.personalize.fedrod import FedRoD
from medfed.personalize.knnper import KNNPer
from medfed.personalize.moon import MOON
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep
from tests.toys import ToyTask


def network() -> nn.Sequential:
    net = nn.Sequential()
    net.add_module("body", nn.Linear(3, 4))
    net.add_module("bn_like_name", nn.Linear(4, 4))
    net.add_module("middle", nn.BatchNorm1d(4))
    net.add_module("other", nn.GroupNorm(2, 4))
    net.add_module("plain", nn.LayerNorm(4, elementwise_affine=False))
    net.add_module("head", nn.Linear(4, 1))
    return net


def test_parts_are_disjoint_and_complete():
    net = network()
    split = ParameterSplit.of(net, ["head.*", "middle.weight"])
    entries = float_entries(net)
    assert set(split.shared) | set(split.personal) == set(entries)
    assert not set(split.shared) & set(split.personal)
    assert split.personal == ("middle.weight", "head.weight", "head.bias")
    shared, personal = split.split(entries)
    assert {**shared, **personal}.keys() == entries.keys()
    assert "middle.num_batches_tracked" not in entries


@pytest.mark.parametrize(
    ("policy", "shared", "parameters"),
    [("averaged", True, False), ("local", False, False), ("frozen", False, False)],
)
def test_buffers_follow_their_policy(policy, shared, parameters):
    split = ParameterSplit.of(network(), ["head.*"], policy)
    assert split.buffers == {"middle.running_mean", "middle.running_var"}
    assert ("middle.running_mean" in split.shared) == shared
    assert ("middle.running_mean" in split.parameters("all")) == parameters
    assert split.parameters("personal") == ("head.weight", "head.bias")


def test_normalisation_is_found_by_type_and_not_by_name():
    assert normalization_patterns(network()) == ("middle.*", "other.*")
    split = ParameterSplit.of(network(), normalization_patterns(network()))
    assert "bn_like_name.weight" in split.shared
    assert "middle.running_var" in split.personal


@sweep(
    ("pattern", "hint"),
    [
        (None, "pattern None matches no parameter"),
        ("heads.*", r"'heads.\*' matches no parameter \(did you mean head.\*"),
        ("head.wieght", r"\(did you mean head.weight"),
        ("head", r"\(did you mean head.\*"),
        ("zzzzzzzz", r"; there are body.weight, body.bias, .* and 6 more\."),
    ],
)
def test_a_pattern_that_matches_nothing_names_near_misses(pattern, hint):
    with pytest.raises(ConfigError, match=hint):
        ParameterSplit.of(network(), ["body.*", pattern])


def test_an_order_of_patterns_changes_nothing():
    names = ["a.x", "b.y", "a.z"]
    assert match(["b.*", "a.z"], names) == match(["a.z", "b.*"], names) == ["b.y", "a.z"]


def test_a_layer_without_weights_is_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"Layer 1 .LazyLinear. has no weights yet: pass one"):
        float_entries(net)
    net(torch.ones(1, 2))
    assert "1.weight" in float_entries(net)


def test_unknown_policy():
    with pytest.raises(ConfigError, match="buffers='mean' is unknown; choose one of averaged, "):
        ParameterSplit.of(network(), policy="mean")


def test_entries_are_live():
    net = network()
    with torch.no_grad():
        float_entries(net)["head.bias"].fill_(5)
    assert net.head.bias.item() == 5


def test_features_need_something_before_the_head():
    ParameterSplit(("body", "head"), (), head=("head",)).check("features", "MOON")
    for head, said in ((("body", "head"), "the head is the whole"), ((), "no part is known")):
        with pytest.raises(ConfigError, match=said):
            ParameterSplit(("body", "head"), (), head=head).check("features", "MOON")


@pytest.mark.parametrize(("layers", "named"), [(1, False), (2, True)], ids=["one", "two"])
@pytest.mark.parametrize(
    "method", [FedALA, FedPAC, FedPHP, FedProto, FedRoD, KNNPer, MOON], ids=lambda m: m.__name__
)
def test_a_refused_head_names_models_that_work(method, layers, named):
    """Of one layer no part is the head alone, so no key could name it."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    split = ParameterSplit.of(net, ["*"])
    split = replace(split, head=split.personal if method.needs == "features" else ())
    with pytest.raises(ConfigError, match="model=mlp") as refused:
        split.check(method.needs, method().title)
    assert ("model.personal" in str(refused.value)) == named


def test_a_refusal_has_the_method_s_name_as_users_write_it():
    with pytest.raises(ConfigError, match=r"^kNN-Per needs .* the head is the whole model"):
        KNNPer().split(nn.Sequential(nn.Linear(2, 2)), ["*"], "averaged")


def test_the_body_is_all_but_the_head():
    task, algorithm = ToyTask(), FedPer(personal="body")
    split = algorithm.split(task.network, task.personal, "averaged")
    head = FedPer().split(task.network, task.personal, "averaged")
    assert split.shared == head.personal == ("head.weight", "head.bias")
    assert split.personal == head.shared
    with pytest.raises(ConfigError, match="there the head is all"):
        algorithm.split(task.network, ["*"], "averaged")


def test_only_the_error_of_one_sample_has_its_sentence():
    with pytest.raises(ValueError, match="more than 1 value") as alone:
        nn.BatchNorm1d(2)(torch.ones(1, 2))
    assert "batches of one sample" in (of_one_sample(alone.value) or "")
    assert of_one_sample(ValueError("another")) is None
