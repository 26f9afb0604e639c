"""What a user's Python code hands over: taken, or refused in one sentence that names it."""

from __future__ import annotations

import copy
import random
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from monai.data import SmartCacheDataset
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import medfed
from medfed.commands.methods import Method, by_family
from medfed.federation import reference
from medfed.federation.algorithm import Algorithm
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.hospital import Hospital
from medfed.federation.reference import onboarded_client, run_onboarding
from medfed.federation.split import ParameterSplit
from medfed.models.networks.canonical import Canonical
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from medfed.standalone.errors import ConfigError, MedfedError


def rows(count, classes=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=g), torch.arange(count) % classes


def hospital(name, count=9, classes=2, **more):
    data = TensorDataset(*rows(count, classes))
    return medfed.Hospital(name, data, data, data, batch_size=4, **more)


def loss(network, batch):
    return cross_entropy(network(batch["image"]), batch["label"])


def network(outputs=2):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, outputs))


def federate(**other):
    """A run with one thing changed."""
    keys = {"algorithm": FedAvg(), "network": network(), "loss": loss, "rounds": 1, **other}
    keys.setdefault("clients", [hospital("a"), hospital("b", 7)])
    places = [keys.pop(name) for name in ("algorithm", "network", "loss", "clients")]
    return medfed.federate(*places, **keys)


class Sharpness(torch.optim.SGD):
    """An optimizer that evaluates the loss twice a step, as SAM does."""

    def step(self, closure=None):
        assert closure is not None, "it needs a closure"


def of(value):
    """A loss that returns something else in place of its number."""
    return lambda net, batch: value(loss(net, batch))


def of_another(other, net, batch):
    """A loss that forgets its first argument."""
    return loss(other, batch)


def of_both(other, net, batch):
    return loss(net, batch) + loss(other, batch)


def weighed(layer, net, batch):
    return cross_entropy(layer(net(batch["image"])), batch["label"])


def expanded(net):
    net.register_buffer("many", torch.zeros(1, 3).expand(4, 3))
    return net


def traced(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(net, torch.zeros(1, 4))


def uncertain(deviation, net, batch):
    return loss(net, batch) * (-deviation).exp().sum() + deviation.sum()


def with_bad_samples(name, value, row):
    images, labels = rows(9)
    images[row, 1] = value
    return medfed.Hospital(name, TensorDataset(images, labels), batch_size=4)


class Noisy(Dataset):
    """Labels by chance of the operating system, which no seed repeats."""

    chance = random.SystemRandom()

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.ones(4), self.chance.random()


def smart_cache():
    return SmartCacheDataset([*range(4)], cache_num=2, replace_rate=0.5, progress=False)


class Short(FedAvg):
    """It replies with a part of each tensor, which addition would broadcast."""

    def fit(self, client, message):
        reply = super().fit(client, message)
        return replace(
            reply, parts={"shared": {n: t[:1] for n, t in reply.parts["shared"].items()}}
        )


def scheduled(scheduler, **other):
    """A federation of the kind that a Lightning Trainer gets, with a schedule."""
    net = network()
    keys = {"algorithm": FedAvg(), "network": net, "loss": partial(loss, net)}
    keys |= {"clients": [hospital("a")], "optimizer": partial(torch.optim.SGD, lr=0.1)}
    return assemble(**{**keys, "scheduler": scheduler, "rounds": 2, **other})


def with_classes(name, count, classes):
    return medfed.Hospital(name, TensorDataset(*rows(count)), classes=classes)


pairs = TensorDataset(*rows(4))
NO_LOSS = "The loss must return one number as a tensor"
NO_OPTIMIZER = "The optimizer or its schedule cannot be used"
MISTAKES = {
    "a name twice": (
        lambda: federate(clients=[hospital("a"), hospital("b"), hospital("a", 3)]),
        "Two clients have the name a; give each its own.",
    ),
    "a name twice, of arrays": (
        lambda: federate(clients=[hospital("a"), medfed.ArrayClient("a", *rows(3))]),
        "Two clients have the name a",
    ),
    "a number as name": (
        lambda: federate(clients=[hospital(1)]),
        "Hospital 1: id must be a text, not 1",
    ),
    "no client": (lambda: federate(clients=[]), "There is no client"),
    "an empty generator": (lambda: federate(clients=iter(())), "There is no client"),
    "one client, no list": (
        lambda: federate(clients=hospital("a")),
        "clients must be a list of Hospital objects, not an object of the type Hospital",
    ),
    "a dictionary": (lambda: federate(clients={"a": hospital("a")}), "not a dict with a"),
    "a data set as client": (
        lambda: federate(clients=[pairs]),
        "an object of the type TensorDataset; give medfed.Hospital(NAME, DATA) for each",
    ),
    "loss: tuple": (lambda: federate(loss=of(lambda v: (v, v))), f"{NO_LOSS}, such as loss.mean"),
    "loss: dict": (lambda: federate(loss=of(lambda v: {"ce": v})), "not a dict with ce"),
    "loss: per sample": (
        lambda: federate(loss=of(lambda v: v.expand(4))),
        "not a tensor of shape [4]",
    ),
    "loss: float": (lambda: federate(loss=of(lambda v: 0.5)), "not 0.5"),
    "loss: None": (lambda: federate(loss=of(lambda v: None)), "not None"),
    "loss: whole number": (lambda: federate(loss=of(lambda v: v.long())), "and type int64"),
    "loss: detached": (lambda: federate(loss=of(torch.detach)), "does not depend on the trained"),
    "loss: of another network": (
        lambda: federate(loss=partial(of_another, network())),
        "The loss does not depend on the network that it is given; compute it from the outputs of",
    ),
    "loss: with weights of its own": (
        lambda: federate(loss=partial(weighed, nn.Linear(2, 2))),
        "weights outside of the network, of shape [2, 2], [2], which no step would train; make",
    ),
    "loss: with a trainable number of its own": (
        lambda: federate(loss=partial(uncertain, torch.zeros(1, requires_grad=True))),
        "The loss has weights outside of the network, of shape [1], which no step would train",
    ),
    "loss: half of it of another network": (
        lambda: federate(loss=partial(of_both, network())),
        "The loss has weights outside of the network, of shape [",
    ),
    "samples: NaN": (
        lambda: federate(clients=[hospital("a"), with_bad_samples("b", torch.nan, 5)]),
        "Client b, round 1, phase fit: the training loss became NaN or infinite, as a training "
        "image holds NaN or infinity; mend that sample, or leave it out.",
    ),
    "samples: infinite": (
        lambda: federate(clients=[with_bad_samples("a", torch.inf, 0)]),
        "as a training image holds NaN or infinity",
    ),
    "network: TorchScript": (
        lambda: federate(network=traced(network())),
        "The network is a TorchScript module, whose weights cannot be exchanged; give the nn.Mod",
    ),
    "a rate beside an optimizer": (
        lambda: federate(optimizer=torch.optim.Adam, lr=0.5),
        "lr=0.5 is the step size of SGD, which the optimizer replaces; give the step size to the",
    ),
    "inference mode": (
        torch.inference_mode()(federate),
        "Nothing trains within torch.inference_mode(); call medfed outside it.",
    ),
    "a copy of a federation": (
        lambda: copy.deepcopy(federate()),
        "A federation can be neither copied nor pickled; keep each hospital's weights",
    ),
    "rate: far too high": (lambda: federate(lr=1e28), "lower optimizer.lr or set local.clip"),
    "network: complex": (
        lambda: federate(network=nn.Linear(4, 2, dtype=torch.cfloat)),
        "The parameter weight is complex, which no method averages; keep its real and its",
    ),
    "loss: criterion": (
        lambda: federate(loss=nn.CrossEntropyLoss()),
        "write def loss(network, batch): return criterion(network(batch['image'])",
    ),
    "loss: function": (
        lambda: federate(loss=nn.functional.cross_entropy),
        "must be a function of a network and a batch, not the function cross_entropy; write def",
    ),
    "loss: text": (lambda: federate(loss="ce"), "must be a function of a network and a batch"),
    "network: class": (lambda: federate(network=nn.Linear), "nn.Module, not the class Linear"),
    "network: function": (lambda: federate(network=loss), "not the function loss"),
    "network: lazy": (
        lambda: federate(network=nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())),
        "Layer 0 (LazyLinear) has no weights yet: pass one batch through the network before it",
    ),
    "network: a lazy normalisation": (
        lambda: federate(network=nn.Sequential(nn.Linear(4, 2), nn.LazyBatchNorm1d())),
        "Layer 1 (LazyBatchNorm1d) has no weights yet",
    ),
    "network: on no device": (
        lambda: federate(network=network().to("meta")),
        "The tensor 0.weight of the network has no memory for each of its numbers (device meta,",
    ),
    "network: an expanded tensor": (
        lambda: federate(network=expanded(network())),
        "The tensor many of the network has no memory for each of its numbers",
    ),
    "network: no parameter": (
        lambda: federate(network=nn.Flatten()),
        "The network Flatten has no parameters, so nothing can train",
    ),
    "networks: none": (lambda: federate(algorithm="ifca", network=[]), "nn.Module, not None"),
    "networks: a number": (
        lambda: federate(algorithm="ifca", network=[network(), 3]),
        "The network must be an nn.Module, not 3",
    ),
    "optimizer: instance": (
        lambda: federate(optimizer=torch.optim.SGD(network().parameters(), lr=0.1)),
        "optimizer must be a function such as partial(torch.optim.SGD, lr=0.1), not an object",
    ),
    "optimizer: text": (
        lambda: federate(optimizer="adam"),
        "optimizer must be a function such as partial(torch.optim.SGD, lr=0.1), not 'adam'.",
    ),
    "optimizer: as in Lightning": (
        lambda: federate(optimizer=lambda p: {"optimizer": torch.optim.SGD(p)}),
        f"{NO_OPTIMIZER}: 'dict' object has no attribute",
    ),
    "optimizer: LBFGS": (
        lambda: federate(optimizer=torch.optim.LBFGS),
        f"{NO_OPTIMIZER}: LBFGS.step() missing 1 required positional argument: 'closure'",
    ),
    "optimizer: closure": (
        lambda: federate(optimizer=partial(Sharpness, lr=0.1)),
        f"{NO_OPTIMIZER}: it needs a closure; give functions",
    ),
    "optimizer: sparse": (
        lambda: federate(optimizer=torch.optim.SparseAdam),
        f"{NO_OPTIMIZER}: SparseAdam does not support dense gradients",
    ),
    "lr: negative": (lambda: federate(lr=-1.0), f"{NO_OPTIMIZER}: Invalid learning rate: -1.0"),
    "lr: text": (lambda: federate(lr="0.1"), "lr must be a number, not '0.1'."),
    "lr: NaN": (lambda: federate(lr=np.nan), f"{NO_OPTIMIZER}: a learning rate must be a number"),
    "scheduler: plateau": (
        lambda: scheduled(torch.optim.lr_scheduler.ReduceLROnPlateau),
        f"{NO_OPTIMIZER}: ReduceLROnPlateau.step() missing 1 required positional argument",
    ),
    "scheduler: text": (
        lambda: scheduled("cosine"),
        "scheduler must be a function, not 'cosine'.",
    ),
    "scheduler: no length": (
        lambda: scheduled(torch.optim.lr_scheduler.CosineAnnealingLR),
        "scheduler must take 1 argument, and the class CosineAnnealingLR does not: missing a",
    ),
    "rounds: 0": (lambda: federate(rounds=0), "rounds must be 1 or more, not 0."),
    "rounds: 1.5": (lambda: federate(rounds=1.5), "rounds must be a whole number, not 1.5."),
    "seed: none": (lambda: federate(seed=None), "seed must be a whole number, not None."),
    "seed: text": (lambda: federate(seed="0"), "seed must be a whole number, not '0'."),
    "seed: 1.5": (lambda: federate(seed=1.5), "seed must be a whole number, not 1.5."),
    "steps: 1.5": (lambda: federate(steps=1.5), "steps must be a whole number, not 1.5"),
    "steps: text": (lambda: federate(steps="all"), "must be a whole number, not 'all'"),
    "split": (lambda: federate().losses("tset"), "split='tset' is unknown (did you mean test?)"),
    "no data": (lambda: medfed.Hospital("a", None), "train is of the type NoneType, without a"),
    "steps: 0": (lambda: federate(steps=0), "local.steps must be in [1, 1000000000], not 0"),
    "buffers": (
        lambda: federate(buffers="avg"),
        "buffers='avg' is unknown (did you mean averaged?)",
    ),
    "cohort": (lambda: federate(cohort=2), "cohort must be a Cohort, not 2"),
    "channel": (lambda: federate(channel="int8"), "channel must be a Channel, not 'int8'"),
    "after_round": (lambda: federate(after_round=3), "after_round must be a function, not 3"),
    "method: class": (
        lambda: federate(algorithm=Ditto),
        "algorithm must be an Algorithm such as Ditto(), not the class Ditto",
    ),
    "personal: number": (
        lambda: federate(algorithm=FedPer(), personal=3),
        "personal must be a text or a list, not 3",
    ),
    "batch_size: 0": (
        lambda: medfed.Hospital("a", pairs, batch_size=0),
        "Hospital a: batch_size must be 1 or more, not 0.",
    ),
    "keys: text": (lambda: medfed.Hospital("a", pairs, keys="ct"), "keys must name image and"),
    "arrays: of NumPy": (
        lambda: medfed.ArrayClient("a", rows(4)[0].numpy(), rows(4)[1]),
        "Client a: inputs must be a tensor with one row per sample, not a ndarray; torch.as_tensor",
    ),
    "arrays: a number": (
        lambda: medfed.ArrayClient("a", rows(4)[0], torch.tensor(1)),
        "Client a: labels must be a tensor with one row per sample",
    ),
    "arrays: fewer labels": (
        lambda: medfed.ArrayClient("a", rows(6)[0], rows(4)[1]),
        "Client a: there are 6 inputs and 4 labels; give one label for each input",
    ),
    "arrays: more labels": (
        lambda: medfed.ArrayClient("a", rows(4)[0], rows(6)[1]),
        "Client a: there are 4 inputs and 6 labels",
    ),
    "arrays: none": (lambda: medfed.ArrayClient("a", *rows(0)), "and at least one of both"),
    "a cache of some samples": (
        lambda: Hospital("a", smart_cache()),
        "SmartCacheDataset, of which an epoch has the 2 samples in the cache and never the others",
    ),
    "test loader: drops the last batch": (
        lambda: Hospital("a", pairs, test=DataLoader(pairs, 3, drop_last=True)),
        "Hospital a: the loader of test leaves out 1 of its samples; set drop_last=False",
    ),
    "labels that no seed repeats": (
        lambda: federate(clients=[Hospital("a", Noisy())]),
        "Hospital a: two epochs of the same seed begin with different samples",
    ),
    "networks: of a method for one": (
        lambda: federate(network=[network(), network()]),
        "FedAvg trains one network, of which each hospital gets its copy; give the network itself",
    ),
    "bytes: of another direction": (
        lambda: federate().ledger.total(direction="upload"),
        "direction='upload' is unknown; choose up or down.",
    ),
    "samples of two shapes": (
        lambda: federate(clients=[Hospital("a", [(torch.zeros(4), 0), (torch.zeros(5), 1)])]),
        "Hospital a: the first batch cannot be made: stack expects each tensor to be equal size",
    ),
    "less than one class": (
        lambda: with_classes("a", 9, -1),
        "Hospital a: classes must be 1 or more, not -1.",
    ),
    "labels beyond the classes": (
        lambda: with_classes("a", 9, 1).label_counts,
        "Hospital a: the label 1 is none of its 1 classes",
    ),
    "folder: number": (
        lambda: medfed.train("rounds=1", folder=3),
        "folder must be a text or a path, not 3.",
    ),
    "overrides: a list": (
        lambda: medfed.train(["experiment=digits_pfednet", "rounds=1"]),
        "each of overrides must be a text of its own, as in train(*LIST), not a list of 2.",
    ),
    "other classes": (
        lambda: federate(
            clients=[with_classes("a", 9, ["x", "y"]), with_classes("b", 9, ["y", "x"])]
        ),
        "a has the classes ['x', 'y'], and b has ['y', 'x']; give all hospitals the same list",
    ),
}
"""Each mistake with what its sentence says."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_one_sentence(mistake):
    make, sentence = MISTAKES[mistake]
    with pytest.raises(MedfedError) as caught:
        make()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def same(one, other):
    return one.federation.digests() == other.federation.digests()


def test_a_loss_may_use_frozen_layers_and_gradients_of_images():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    seen = []

    def smooth(net, batch):
        image = batch["image"].clone().requires_grad_()
        value = weighed(frozen, net, {**batch, "image": image})
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(value, image, create_graph=True)
            seen.append(float(slope.detach().square().sum()))
            value = value + slope.square().sum()
        return value

    federate(loss=smooth)
    assert min(seen) > 0


def test_an_error_in_a_loss_names_the_client_and_the_batch():
    def other_type(net, batch):
        return cross_entropy(net(batch["image"]), batch["label"].float())

    with pytest.raises(RuntimeError) as caught:
        federate(loss=other_type)
    notes = [
        "(in the loss of a batch of image [4, 4] float32, label [4] int64)",
        "(client a, round 1, phase fit)",
    ]
    assert caught.value.__notes__ == notes


def test_a_reply_of_another_shape_is_not_broadcast():
    with pytest.raises(ValueError, match=r"0.weight has the shapes \[3, 4\] and \[1, 4\]"):
        federate(algorithm=Short(), clients=[hospital("a")])


def halved(parameter):
    parameter.grad *= 0.5


HOOKS = {
    "of the gradient": lambda p: p.register_hook(lambda gradient: gradient * 0.5),
    "after the gradient": lambda p: p.register_post_accumulate_grad_hook(halved),
}


@pytest.mark.parametrize("several", [False, True], ids=["one network", "several"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_a_parameter_works_in_the_copy_that_trains(hook, several):
    """Halved gradients of all parameters are half the step size."""
    ends = []
    for lr, register in ((0.2, HOOKS[hook]), (0.1, lambda _: None)):
        torch.manual_seed(3)
        nets = [nn.Linear(4, 2) for _ in range(2)]
        for parameter in (p for net in nets for p in net.parameters()):
            register(parameter)
        method, start = ("ifca", nets) if several else (FedAvg(), nets[0])
        keys = {"algorithm": method, "network": start, "lr": lr, "steps": 1}
        ends.append(federate(**keys, clients=[hospital("a")]))
    assert same(*ends)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_with_one_entry_is_a_number(shape):
    assert same(federate(loss=of(lambda v: v.reshape(shape))), federate())


def mixed_up(net, batch):
    """Mixup, as tutorials write it: by the global generators of NumPy and Python."""
    share, shift = np.random.beta(1, 1), random.randrange(1, 3)
    image = share * batch["image"] + (1 - share) * batch["image"].roll(shift, 0)
    return loss(net, {**batch, "image": image})


def test_whatever_a_loss_draws_follows_the_seed():
    first = federate(loss=mixed_up)
    np.random.rand()
    random.random()
    before = random.getstate(), np.random.get_state()[1].tolist()
    again, other = federate(loss=mixed_up), federate(loss=mixed_up, seed=1)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    assert same(first, again)
    assert not same(first, other)


def test_numbers_and_names_of_numpy_are_those_of_python():
    a, b = np.array(["a", "b"])
    numbers = {"seed": np.int64(3), "rounds": np.int32(2), "steps": np.int64(2)}
    done = federate(**numbers, clients=[hospital(a), hospital(b, 7)])
    assert same(done, federate(seed=3, rounds=2, steps=2))


def test_clients_may_come_from_a_generator():
    clients = (hospital(name, count) for name, count in (("a", 9), ("b", 7)))
    assert same(federate(clients=clients), federate())


def test_an_optimizer_may_be_a_class():
    assert same(
        federate(optimizer=torch.optim.Adam), federate(optimizer=partial(torch.optim.Adam, lr=1e-3))
    )


def test_one_text_is_one_pattern_everywhere():
    by_text, by_list = (ParameterSplit.of(network(), part) for part in ("2.*", ["2.*"]))
    assert by_text == by_list
    assert by_text.personal == ("2.weight", "2.bias")
    splits = [
        method.split(network(), part, "averaged")
        for method, part in ((FedPer(), "2.*"), (FedPer(), ["2.*"]), (FedPer(personal="2.*"), ()))
    ]
    assert all(split.personal == by_list.personal for split in splits)
    canonical = [
        Canonical([network(), nn.Sequential(*map(again, network()))], p) for p in ("2.*", ["2.*"])
    ]
    names = [[name for name, _ in net.named_parameters()] for net in canonical]
    assert names[0] == names[1]
    net = network()
    federation, _ = assemble(
        FedPer(),
        net,
        partial(loss, net),
        [hospital("a")],
        optimizer=torch.optim.SGD,
        personal="2.*",
        budget=LocalBudget(steps=1),
    )
    assert federation.clients["a"].split.personal == by_list.personal


def again(layer):
    """A layer of the same kind with other weights."""
    return (
        nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else layer
    )


class Counted(medfed.ArrayClient):
    """Data that know all classes."""

    @property
    def label_counts(self):
        return torch.bincount(self.labels, minlength=3)


def batched_alike(count, classes):
    """Whole batches, so that no order matters."""
    inputs, labels = rows(count, classes)
    return inputs.double(), labels


LABELS = PFedNet(personal="all", graph=SimilarityGraph(kind="knn", sketch="label", neighbours=1))


@pytest.mark.parametrize("method", ["fedrod", "ppfl", LABELS], ids=["fedrod", "ppfl", "pfednet"])
def test_a_hospital_may_lack_the_highest_class(method):
    """The result is that of data which count their labels over all classes."""
    sizes = {"a": (12, 3), "b": (8, 2), "c": (10, 3)}
    torch.manual_seed(0)
    nets = network(3).double()
    if method == "ppfl":
        nets = [nn.Linear(4, 3, dtype=torch.float64) for _ in range(2)]
    keys = {"rounds": 2, "steps": 2, **({} if method == "ppfl" else {"personal": "2.*"})}
    runs = []
    for kind in (medfed.ArrayClient, Counted):
        clients = [kind(n, *batched_alike(*size), 64) for n, size in sizes.items()]
        runs.append(medfed.federate(method, nets, loss, clients, **keys))
    assert same(*runs)
    clients = {n: c.data.label_counts.tolist() for n, c in runs[0].federation.clients.items()}
    assert clients == {"a": [4, 4, 4], "b": [4, 4, 0], "c": [4, 3, 3]}


def test_agreed_classes_hold_where_no_hospital_has_the_highest():
    one = with_classes("a", 9, ["benign", "unclear", "malignant"])
    assert one.label_counts.tolist() == [5, 4, 0]
    done = federate(
        network=network(3), clients=[one, with_classes("b", 4, ["benign", "unclear", "malignant"])]
    )
    counts = [c.data.label_counts.tolist() for c in done.federation.clients.values()]
    assert counts == [[5, 4, 0], [2, 2, 0]]


def test_a_hospital_that_joins_counts_the_classes_of_the_federation():
    done = federate(
        algorithm=replace(LABELS, shared_rounds=0),
        network=network(3),
        clients=[hospital("a", 9, 3), hospital("b", 9, 3)],
    )
    newcomer = onboarded_client(done.federation, hospital("new", 6, 2))
    assert newcomer.data.label_counts.tolist() == [3, 3, 0]
    run_onboarding(done.federation, newcomer)
    more = onboarded_client(done.federation, hospital("new", 8, 4))
    with pytest.raises(ConfigError, match="Hospital new has the label 3, and the federation has 3"):
        _ = more.data.label_counts


def test_a_method_of_an_unknown_family_comes_last(tmp_path):
    class Mine(FedAvg):
        card = replace(FedAvg.card, family="my own family")

    methods = [Method("mine", tmp_path, Mine), Method("fedavg", tmp_path, FedAvg)]
    assert [m.name for m in by_family(iter(methods))] == ["fedavg", "mine"]
    assert issubclass(Mine, Algorithm)


ODD = (
    None,
    True,
    -1,
    2.5,
    "nonsense",
    object(),
    [object()],
    {"a": 1},
    lambda: None,
)
TAKES = {
    "federate": (federate, {*signature(reference.federate).parameters}),
    "assemble": (
        lambda **other: scheduled(other.pop("scheduler", None), **other),
        {*signature(assemble).parameters} - {"channel", "measure", "everyone", "shape", "compares"},
    ),
    "Hospital": (
        lambda **other: medfed.Hospital(**{"id": "a", "train": pairs, **other}),
        {*signature(medfed.Hospital).parameters},
    ),
    "ArrayClient": (
        lambda **other: medfed.ArrayClient(
            **{"id": "a", "inputs": rows(4)[0], "labels": rows(4)[1], **other}
        ),
        {*signature(medfed.ArrayClient).parameters},
    ),
    "Run": (lambda **other: medfed.Run(**other), {"folder"}),
    "train, an override": (lambda **other: medfed.train(other["override"]), {"override"}),
    "losses": (lambda **other: federate(rounds=1, steps=1).losses(**other), {"split"}),
    "levels": (lambda **other: federate(rounds=1, steps=1).levels(**other), {"split"}),
    "model": (lambda **other: federate(rounds=1, steps=1).model(**other), {"client"}),
}
"""Functions of a user's code, and the arguments that they take."""


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, (_, takes) in TAKES.items() for a in sorted(takes)]
)
def test_what_an_argument_is_not_is_refused_in_a_sentence(function, argument):
    call, _ = TAKES[function]
    refused = 0
    for odd in ODD:
        with suppress(MedfedError):
            call(**{argument: odd})
            refused -= 1
        refused += 1
    assert refused >= len(ODD) // 2
