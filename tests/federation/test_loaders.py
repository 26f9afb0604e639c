"""An epoch is what a hospital's loader yields, and whatever is random in it follows the seed."""

from __future__ import annotations

import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import ArrayDataset, CacheDataset, PersistentDataset, ThreadDataLoader, ZipDataset
from monai.data import DataLoader as MonaiLoader
from monai.data import Dataset as MonaiDataset
from monai.transforms import (
    Compose,
    OneOf,
    RandAffined,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoise,
    RandGaussianNoised,
    RandomOrder,
    RandShiftIntensityd,
    RandSpatialCropSamplesd,
    RandZoomd,
    SomeOf,
)
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from medfed.common.random_states import RandomStates
from medfed.federation.hospital import ArrayClient, Hospital
from medfed.federation.inputs import Pool
from medfed.federation.reference import federate
from medfed.personalize.fedavg import FedAvg
from medfed.standalone.errors import ConfigError


def numbered(count):
    """Samples that carry their number, so that an epoch shows which it holds."""
    numbers = torch.arange(count, dtype=torch.float32)
    return TensorDataset(numbers.unsqueeze(1), numbers.long() % 3)


class Batches(Dataset):
    """A data set whose items are batches of differing sizes."""

    def __init__(self, sizes):
        self.items = [(torch.full((n, 1), float(k)), torch.zeros(n)) for k, n in enumerate(sizes)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Uneven(Sampler):
    """A batch sampler without a length, with batches of 1, 2, 3 and so on samples."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        order, size = torch.randperm(self.count).tolist(), 1
        while order:
            yield order[:size]
            order, size = order[size:], size + 1


def odd_ones(samples):
    """Leaves out every other sample, as functions do that drop unreadable ones."""
    return torch.utils.data.default_collate(samples[::2])


LOADERS = {
    "plain": lambda n, size: DataLoader(numbered(n), size, shuffle=True),
    "in order": lambda n, size: DataLoader(numbered(n), size),
    "drop_last": lambda n, size: DataLoader(numbered(n), min(n, size), True, drop_last=True),
    "weighted": lambda n, size: DataLoader(
        numbered(n), size, sampler=WeightedRandomSampler(torch.ones(n), 2 * n + 1)
    ),
    "subset": lambda n, size: DataLoader(
        numbered(n), size, sampler=SubsetRandomSampler(range(0, n, 2))
    ),
    "batch_sampler": lambda n, size: DataLoader(
        numbered(n), batch_sampler=BatchSampler(RandomSampler(numbered(n)), size, False)
    ),
    "dropping batch_sampler": lambda n, size: DataLoader(
        numbered(n), batch_sampler=BatchSampler(SequentialSampler(range(n)), min(n, size), True)
    ),
    "own batch_sampler": lambda n, size: DataLoader(numbered(n), batch_sampler=Uneven(n)),
    "list of batches": lambda n, size: DataLoader(numbered(n), batch_sampler=[[0], [0] * size]),
    "batches": lambda n, size: DataLoader(Batches(range(1, n + 1)), batch_size=None, shuffle=True),
    "own collate": lambda n, size: DataLoader(numbered(n), size, collate_fn=odd_ones),
}


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=12, deadline=None)
@given(count=st.integers(1, 23), size=st.integers(1, 9), seed=st.integers(0, 99))
def test_an_epoch_is_what_the_loader_yields(kind, count, size, seed):
    expected = [len(images) for images, _ in LOADERS[kind](count, size)]
    hospital = Hospital("a", LOADERS[kind](count, size))
    assert sorted(len(b["image"]) for b in hospital.train_batches(seed)) == sorted(expected)
    assert hospital.num_samples == sum(expected)
    assert hospital.num_batches == len(expected)
    assert hospital.batch_size == max(expected)
    # The training samples in order are those that epochs hold.
    in_order = torch.cat([b["image"] for b in hospital.eval_batches("train")]).flatten()
    assert in_order.tolist() == sorted(in_order.tolist())
    if kind not in ("drop_last", "dropping batch_sampler", "own collate"):
        assert len(in_order) == sum(expected)
    assert hospital.patients_behind(1000) <= min(len(hospital._train.dataset), sum(expected))


@pytest.mark.parametrize("kind", ["drop_last", "weighted", "own batch_sampler", "batches"])
def test_a_round_takes_an_epoch_and_weighs_its_samples(kind):
    count, size = 11, 4
    given_ = [len(images) for images, _ in LOADERS[kind](count, size)]
    seen = []

    def loss(network, batch):
        seen.append(len(batch["image"]))
        return network(batch["image"]).square().mean()

    clients = [Hospital("a", LOADERS[kind](count, size)), ArrayClient("b", *numbered(5).tensors)]
    network = torch.nn.Linear(1, 1, bias=False)
    keys = {"rounds": 1, "lr": 1e-4}
    done = federate(FedAvg(), network, loss, clients, **keys)
    assert sorted(seen[: len(given_)]) == sorted(given_)
    alone = [
        float(federate(FedAvg(), network, loss, [c], **keys).weights(c.id)["weight"])
        for c in clients
    ]
    assert alone[0] != alone[1]
    mean = (sum(given_) * alone[0] + 5 * alone[1]) / (sum(given_) + 5)
    assert float(done.weights("a")["weight"]) == pytest.approx(mean, abs=1e-6)


def test_pooled_training_reads_whole_epochs():
    loaders = ("drop_last", "weighted", "batches")
    clients = [Hospital(k, LOADERS[k](9, 4)) for k in loaders]
    pool = Pool(clients[0], clients)
    images = [b["image"] for b in pool.train_batches(3)]
    assert sum(map(len, images)) == sum(c.num_samples for c in clients)
    assert pool.num_batches == -(-pool.num_samples // clients[0].batch_size)


def test_a_sampler_that_splits_a_data_set_leaks_nothing():
    """The training samples in order are those that the sampler names, not the whole data set."""
    hospital = Hospital("a", DataLoader(numbered(10), 4, sampler=SubsetRandomSampler([8, 1, 5])))
    assert torch.cat([b["image"] for b in hospital.eval_batches("train")]).flatten().tolist() == [
        1.0,
        5.0,
        8.0,
    ]
    assert hospital.label_counts.tolist() == [0, 1, 2]
    assert sorted(hospital.train_inputs(9).flatten().tolist()) == [1.0, 5.0, 8.0]


def test_several_crops_of_a_volume_are_samples():
    items = [{"image": torch.arange(64.0).reshape(1, 8, 8) + k} for k in range(5)]
    crop = RandSpatialCropSamplesd("image", (4, 4), num_samples=3, random_size=False)
    for data in (MonaiLoader(MonaiDataset(items, crop), batch_size=2), MonaiDataset(items, crop)):
        hospital = Hospital("a", data, batch_size=2)
        assert (hospital.num_samples, hospital.num_batches, hospital.batch_size) == (15, 3, 6)
        assert [len(b["image"]) for b in hospital.train_batches(0)] == [6, 6, 3]


def items(count=8):
    return [{"image": torch.zeros(1, 3), "label": 0} for _ in range(count)]


def noise():
    return Compose([RandGaussianNoised("image", prob=1.0)])


class Own(Dataset):
    """A data set whose noise comes from where a case says."""

    def __init__(self, change, **more):
        self.change, self.more = change, more

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"image": self.change(torch.zeros(1, 3)), "label": 0}


class OfTheClass(Own):
    random = np.random.default_rng()

    def __init__(self):
        super().__init__(lambda x: x + float(self.random.normal()))


class InSlots:
    __slots__ = ("states",)

    def __init__(self):
        self.states = {"noise": [random.Random()]}

    def __call__(self, x):
        return x + self.states["noise"][0].gauss(0, 1)


ELSEWHERE = np.random.default_rng()


def from_the_module(x):
    return x + float(ELSEWHERE.normal())


def by_argument(state, x):
    return x + torch.from_numpy(state.standard_normal(3)).float()


def by_closure():
    state = torch.Generator()
    return Own(lambda x: x + torch.randn(1, 3, generator=state))


def by_method(draw):
    return Own(lambda x: x + float(draw()))


class Lazy:
    """It makes its random state for the first sample."""

    random = None

    def __call__(self, x):
        if self.random is None:
            self.random = np.random.default_rng()
        return x + float(self.random.normal())


class Shuffled(Sampler):
    """Its order comes from a state of its own."""

    def __init__(self):
        self.random = np.random.RandomState()

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(self.random.permutation(8).tolist())


HIDDEN = {
    "transform": lambda _: MonaiDataset(items(), noise()),
    "Subset": lambda _: Subset(MonaiDataset(items(), noise()), range(6)),
    "random_split": lambda _: random_split(MonaiDataset(items(), noise()), [6, 2])[0],
    "ConcatDataset": lambda _: ConcatDataset([MonaiDataset(items(3), noise()) for _ in "ab"]),
    "nested": lambda _: Subset(
        ConcatDataset([Subset(MonaiDataset(items(), noise()), [0, 1])]), [0, 1]
    ),
    "CacheDataset": lambda _: CacheDataset(items(), noise(), progress=False),
    "PersistentDataset": lambda folder: PersistentDataset(items(), noise(), folder),
    "ArrayDataset": lambda _: ArrayDataset(
        [torch.zeros(1, 3)] * 8, RandGaussianNoise(prob=1.0), [0] * 8
    ),
    "ZipDataset": lambda _: ZipDataset(
        [MonaiDataset([torch.zeros(1, 3)] * 8, RandGaussianNoise(prob=1.0)), [0] * 8]
    ),
    "attribute": lambda _: Own(RandGaussianNoise(prob=1.0)),
    "list": lambda _: Own(lambda x: x, steps=[noise()]),
    "slots": lambda _: Own(InSlots()),
    "lazy": lambda _: Own(Lazy()),
    "class": lambda _: OfTheClass(),
    "module": lambda _: Own(from_the_module),
    "partial": lambda _: Own(partial(by_argument, np.random.default_rng())),
    "closure": lambda _: by_closure(),
    "method of NumPy": lambda _: by_method(np.random.default_rng().normal),
    "another RandomState": lambda _: by_method(np.random.RandomState(np.random.PCG64()).normal),
    "bound method": lambda _: Own(partial(by_argument, np.random.RandomState()).__call__),
    "torch": lambda _: Own(lambda x: x + torch.randn(1, 3)),
    "numpy": lambda _: Own(lambda x: x + float(np.random.normal())),
    "python": lambda _: Own(lambda x: x + random.gauss(0, 1)),
}


def images(hospital, seed):
    return torch.cat([b["image"] for b in hospital.train_batches(seed)]).flatten(1)


@pytest.mark.parametrize("place", HIDDEN)
def test_random_transforms_follow_the_seed_wherever_they_are(place, tmp_path):
    hospital = Hospital("a", HIDDEN[place](tmp_path), batch_size=2)
    one, other = images(hospital, 3), images(hospital, 4)
    again = images(hospital, 3)
    assert torch.equal(one, again)
    if place != "list":  # whose transforms it does not apply
        assert not torch.equal(one, other)
        assert len(one.unique(dim=0)) == len(one)  # each sample has other noise
        # A new object of the same data, as after resuming, draws the same.
        assert torch.equal(images(Hospital("a", HIDDEN[place](tmp_path), batch_size=2), 3), one)


@pytest.mark.parametrize(
    "place",
    [
        "Subset",
        "random_split",
        "ConcatDataset",
        "CacheDataset",
        "ArrayDataset",
        "attribute",
        "partial",
        "numpy",
    ],
)
def test_workers_draw_different_noise_that_follows_the_seed(place, tmp_path):
    loader = DataLoader(HIDDEN[place](tmp_path), 1, shuffle=True, num_workers=2)
    hospital = Hospital("a", loader)
    one, again, other = (images(hospital, seed) for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert len(torch.cat([one, other]).unique(dim=0)) == 2 * len(one)
    assert loader.worker_init_fn is None  # the user's loader is as it was


def test_a_users_start_of_workers_is_kept():
    data = Own(lambda x: x + data.more["offset"] + torch.randn(1, 3), offset=0.0)

    def begin(number):
        torch.utils.data.get_worker_info().dataset.more["offset"] = 1000.0
        np.random.seed(os.getpid())

    hospital = Hospital("a", DataLoader(data, 4, num_workers=2, worker_init_fn=begin))
    assert bool((images(hospital, 1) > 900).all())
    assert torch.equal(images(hospital, 1), images(hospital, 1))


def test_hospitals_of_one_data_set_do_not_depend_on_each_other():
    """Epochs that take turns are those that run one after the other."""
    data = MonaiDataset(items(), noise())
    first, second = (
        Hospital(n, Subset(data, range(k, k + 4)), batch_size=2) for n, k in (("a", 0), ("b", 4))
    )
    alone = [[b["image"] for b in h.train_batches(s)] for h, s in ((first, 1), (second, 2))]
    turns = [*zip(first.train_batches(1), second.train_batches(2), strict=True)]
    for side in (0, 1):
        together = [pair[side]["image"] for pair in turns]
        assert all(map(torch.equal, together, alone[side]))


def test_random_states_of_the_user_are_left_as_they_were():
    states = {"own": np.random.RandomState(1), "torch": torch.Generator().manual_seed(1)}
    data = Own(lambda x: x + states["own"].normal() + torch.randn(1, generator=states["torch"]))
    before = states["own"].get_state()[1].tolist(), states["torch"].get_state().tolist()
    outside = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    hospital = Hospital("a", data)
    assert hospital.num_samples == 8
    list(hospital.train_batches(0))
    assert (states["own"].get_state()[1].tolist(), states["torch"].get_state().tolist()) == before
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert now == outside


@pytest.mark.parametrize("loader", [None, "shuffled"])
def test_evaluation_sees_the_same_images_each_time(loader):
    data = MonaiDataset(items(), noise())
    given_ = data if loader is None else DataLoader(data, 2, shuffle=True)
    hospital = Hospital("a", given_, given_, given_)
    for split in ("train", "val", "test"):
        one, again = (torch.cat([b["image"] for b in hospital.eval_batches(split)]) for _ in "ab")
        assert torch.equal(one, again)


@pytest.mark.parametrize("sampler", [Shuffled(), RandomSampler(range(8))], ids=["own", "torch"])
def test_the_order_follows_the_seed(sampler):
    hospital = Hospital("a", DataLoader(numbered(8), 3, sampler=sampler))
    one, again, other = (images(hospital, seed).flatten().tolist() for seed in (1, 1, 2))
    assert one == again != other
    assert sorted(one) == sorted(other) == list(range(8))


class Stream(IterableDataset):
    """A stream that has a length, too."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(items(4))


class Endless(Uneven):
    def __iter__(self):
        while True:
            yield [0]


REFUSED = {
    "stream": (lambda: Stream(), "is of the type Stream, an IterableDataset"),
    "loader of a stream": (lambda: DataLoader(Stream()), "is of the type Stream, an IterableD"),
    "mapping": (lambda: {"image": torch.zeros(3)}, "of the type dict, without a length or"),
    "living workers": (
        lambda: DataLoader(numbered(4), num_workers=1, persistent_workers=True),
        "train keeps its workers for several epochs, so that no seed",
    ),
    "thread": (lambda: ThreadDataLoader(numbered(4)), "train is a ThreadDataLoader, so that no"),
    "nothing left": (
        lambda: DataLoader(numbered(4), 8, drop_last=True),
        "the loader of train yields no batch; set drop_last=False, or a smaller batch_size",
    ),
    "empty sampler": (lambda: DataLoader(numbered(4), sampler=[]), "yields no batch"),
    "of no seed": (
        lambda: Own(lambda x: x + random.SystemRandom().random()),
        "two epochs of the same seed begin with different samples",
    ),
    "endless": (
        lambda: DataLoader(numbered(4), batch_sampler=Endless(4)),
        "the sampler of train does not end",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_loaders_that_no_seed_determines_are_refused_in_one_sentence(case, monkeypatch):
    monkeypatch.setattr("medfed.federation.hospital._MOST", 50)
    make, sentence = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        federate(
            FedAvg(),
            torch.nn.Linear(3, 1),
            lambda n, b: n(b["image"]).mean(),
            [Hospital("a", make())],
        )
    assert str(caught.value).startswith("Hospital a: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_that_fails_leaves_the_states_as_they_were():
    def fail():
        with RandomStates(1):
            torch.randn(3)
            raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_monai_composes_follows_the_seed():
    def change():
        either = OneOf([RandGaussianNoised("image", prob=1.0), RandShiftIntensityd("image", 1.0)])
        some = SomeOf([RandFlipd("image", 0.5), RandZoomd("image", 0.5)], num_transforms=1)
        crop = RandCropByPosNegLabeld("image", "label", (4, 4), num_samples=2)
        affine = RandAffined("image", prob=0.9, rotate_range=1.0, translate_range=2)
        return Compose([affine, RandomOrder([either, some]), crop])

    def volumes():
        plane = torch.arange(64.0).reshape(1, 8, 8)
        return [{"image": plane + k, "label": (plane > 20).float()} for k in range(6)]

    def hospital():
        data = MonaiDataset(volumes(), change())
        return Hospital("a", Subset(data, range(5)), batch_size=2)

    first, second = hospital(), hospital()
    list(second.train_batches(1))  # another history
    one, again, other = images(first, 3), images(second, 3), images(first, 4)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


class Slower(DataLoader):
    """A loader of which nothing is known."""


@pytest.mark.parametrize("sampler", ["shuffled", "in_order", "weighted", "dropped"])
def test_rows_of_tensors_are_picked_in_the_order_of_a_loader(sampler):
    data = TensorDataset(torch.randn(37, 3), torch.arange(37) % 2)
    how = {
        "shuffled": {"shuffle": True},
        "in_order": {},
        "weighted": {"sampler": WeightedRandomSampler(torch.arange(1.0, 38.0), 50)},
        "dropped": {"shuffle": True, "drop_last": True},
    }[sampler]
    quick, slow = (Hospital("a", kind(data, 8, **how)) for kind in (DataLoader, Slower))
    for seed in range(3):
        pairs = [*zip(quick.train_batches(seed), slow.train_batches(seed), strict=True)]
        assert len(pairs) == slow.num_batches
        assert all(torch.equal(a[k], b[k]) for a, b in pairs for k in ("image", "label"))
    assert quick.num_samples == slow.num_samples
    pairs = [*zip(quick.eval_batches("train"), slow.eval_batches("train"), strict=True)]
    assert all(torch.equal(a["image"], b["image"]) for a, b in pairs)
