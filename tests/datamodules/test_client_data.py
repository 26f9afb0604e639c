import pytest
import torch
from monai.transforms import Compose, RandFlipd, RandShiftIntensityd

from medfed.datamodules.client_data import ClientData
from medfed.standalone.errors import DataError


def make(samples=10, augment=None):
    image = torch.arange(samples * 2 * 4.0).reshape(samples, 2, 2, 2)
    image[:, 1] = 0
    block = {
        "image": image,
        "label": torch.ones(samples, 1, 2, 2),
        "case": torch.arange(samples),
    }
    return ClientData(
        id="clinic",
        train=block,
        evaluation={"val": [block], "test": []},
        channels=torch.tensor([True, False]),
        label_counts=torch.tensor([0.0, 40.0]),
        patients={"train": ["p"], "val": ["q"], "test": []},
        batch_size=4,
        augment=augment,
    )


def epoch(client, seed):
    return torch.cat([b["image"] for b in client.train_batches(seed)])


def test_an_epoch_is_a_permutation_fixed_by_its_seed():
    client = make()
    torch.manual_seed(0)
    first = epoch(client, 1)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first, epoch(client, 1))
    assert torch.equal(state, torch.get_rng_state())  # the global stream is untouched
    assert not torch.equal(first, epoch(client, 2))
    assert sorted(first[:, 0, 0, 0].tolist()) == client.train["image"][:, 0, 0, 0].tolist()
    assert [len(b["image"]) for b in client.train_batches(1)] == [4, 4, 2]


def test_two_epochs_may_be_interleaved():
    client = make()
    pairs = zip(client.train_batches(3), client.train_batches(3), strict=True)
    assert all(torch.equal(a["image"], b["image"]) for a, b in pairs)


def test_train_inputs_are_spread_evenly():
    client = make()
    assert client.train_inputs(5)[:, 0, 0, 0].tolist() == [0, 16, 32, 48, 64]
    assert len(client.train_inputs(99)) == 10


def test_augmentation_is_seeded_and_leaves_missing_channels_zero():
    transform = Compose(
        [
            RandFlipd(["image", "label"], prob=0.5, spatial_axis=0),
            RandShiftIntensityd(["image"], offsets=5.0, prob=1.0),
        ]
    )
    client = make(augment=transform)
    first = epoch(client, 1)
    assert torch.equal(first, epoch(client, 1))
    assert not torch.equal(first, epoch(make(), 1))
    assert not first[:, 1].any()
    assert type(first) is torch.Tensor
    assert torch.equal(next(client.eval_batches("train"))["image"], client.train["image"][:16])


def test_no_training_data_is_an_error_naming_the_client():
    with pytest.raises(DataError, match="Client clinic has no training data"):
        make(samples=0)


def test_an_empty_split_yields_nothing():
    assert list(make().eval_batches("test")) == []


def test_an_empty_block_gives_no_batch():
    client = make()
    block = {name: values[:0] for name, values in client.train.items()}
    client.evaluation = {"val": [block], "test": [block]}
    assert list(client.eval_batches("val")) == []
