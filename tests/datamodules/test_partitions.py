import pytest

from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import Auto, ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.partitions.by_label import LabelImbalance
from medfed.datamodules.readers.base import Patient
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

CHANNELS = ("FLAIR", "T1w", "T1gd", "T2w")
CLIENTS = ("a", "b", "c", "d", "e")
BINARY = [Patient(f"p{i:03d}", label=int(i % 5 < 2)) for i in range(500)]  # 300 : 200


def missing(partition, seed=0, clients=CLIENTS):
    table = partition.availability(clients, CHANNELS, seed)
    return {
        c: [n for n, p in zip(CHANNELS, row.tolist(), strict=True) if not p]
        for c, row in table.items()
    }


def test_rotate():
    expected = {"a": ["FLAIR"], "b": ["T1w"], "c": ["T1gd"], "d": ["T2w"], "e": ["FLAIR"]}
    assert missing(ChannelMissing(ByCentre(), "rotate")) == expected


def test_lack_k_by_id_or_position():
    partition = ChannelMissing(ByCentre(), "lack_k", channel="t2w", clients=["b", 3])
    assert missing(partition) == {"a": [], "b": ["T2w"], "c": [], "d": ["T2w"], "e": []}


def test_table_and_none():
    partition = ChannelMissing(ByCentre(), "table", table={"b": ["T1w", "FLAIR"]})
    assert missing(partition)["b"] == ["T1gd", "T2w"]
    assert not any(missing(ChannelMissing(ByCentre(), "none")).values())


def test_random_is_seeded_and_never_takes_all():
    partition = ChannelMissing(ByCentre(), "random", probability=0.9)
    many = tuple(f"c{i}" for i in range(50))
    drawn = missing(partition, 1, many)
    assert drawn == missing(partition, 1, many) != missing(partition, 2, many)
    assert max(len(m) for m in drawn.values()) == 3
    assert missing(partition, 1, many[:3]) == {c: drawn[c] for c in many[:3]}


@sweep(
    ("settings", "message"),
    [
        ({"preset": "rotat"}, "did you mean rotate"),
        ({"preset": "lack_k"}, "needs partition.channel and .clients"),
        (
            {"preset": "lack_k", "channel": "T9", "clients": ["a"]},
            "Unknown channel T9; known: FLAIR",
        ),
        ({"preset": "lack_k", "channel": "T1w", "clients": ["z"]}, "Unknown client z; known: a, b"),
        ({"preset": "lack_k", "channel": "T1w", "clients": [7]}, "Unknown client 7"),
        ({"preset": "table"}, "needs partition.table"),
        ({"preset": "table", "table": {"a": []}}, "Each channel must be named once; got: none"),
        ({"preset": "random", "probability": 1.0}, r"must be in \[0, 1\)"),
    ],
)
def test_bad_channel_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        ChannelMissing(ByCentre(), **settings).availability(CLIENTS, CHANNELS, 0)


def test_a_single_channel_cannot_be_taken_away():
    with pytest.raises(ConfigError, match="Client a would lack every channel"):
        ChannelMissing(ByCentre(), "rotate").availability(["a"], ["T1w"], 0)


def test_by_centre_keeps_the_names_and_the_chosen_order():
    patients = [
        Patient("1", centre="Basel"),
        Patient("2", centre="Aarau"),
        Patient("3", centre="Basel"),
    ]
    assert ByCentre().assign(patients, 0) == {"Aarau": ["2"], "Basel": ["1", "3"]}
    assert list(ByCentre(["basel"]).assign(patients, 0)) == ["Basel"]
    with pytest.raises(ConfigError, match="Unknown centre Bern; known: Aarau, Basel"):
        ByCentre(["Bern"]).assign(patients, 0)
    with pytest.raises(ConfigError, match="Patient 4 has no centre"):
        ByCentre().assign([*patients, Patient("4")], 0)


@pytest.mark.parametrize("protocol", ["centre", "shards"])
@pytest.mark.parametrize("named", [True, False])
def test_only_another_protocol_is_offered(protocol, named):
    """A client per hospital is what partition=centre makes, and all that it can make."""
    patients = [Patient(name, centre="Basel" if named else None) for name in "abc"]
    remark = Auto(protocol=protocol).remark(patients)
    assert (
        ("set partition=shards" in remark)
        == ("partition=" in remark.replace("=auto", ""))
        == (protocol == "shards")
    )
    assert ("at random" in remark) != named


def test_round_robin_deals_everyone_once():
    clients = RoundRobin(7).assign(BINARY, seed=1)
    assert sorted(i for ids in clients.values() for i in ids) == [p.id for p in BINARY]
    assert {len(ids) for ids in clients.values()} == {71, 72}
    assert clients == RoundRobin(7).assign(BINARY, seed=1) != RoundRobin(7).assign(BINARY, seed=2)


@sweep("num_clients", [2, 5, 20])
@sweep("delta", [1.0, 2.0, 4.0, 7.0])
def test_label_imbalance_ratios(num_clients, delta):
    partition = LabelImbalance(num_clients, delta)
    clients = partition.assign(BINARY, seed=3)
    label = {p.id: p.label for p in BINARY}
    ids = [i for part in clients.values() for i in part]
    assert len(ids) == len(set(ids))
    half = (num_clients + 1) // 2
    for n, part in enumerate(clients.values()):
        positives = sum(label[i] for i in part)
        share = 1 / (1 + delta) if n < half else delta / (1 + delta)
        assert abs(positives - share * len(part)) <= 0.5
    assert clients == partition.assign(BINARY, seed=3) != partition.assign(BINARY, seed=4)


def test_label_imbalance_takes_as_many_as_fit():
    clients = LabelImbalance(2, delta=1.0).assign(BINARY, seed=0)
    assert [len(part) for part in clients.values()] == [200, 200]
    fixed = LabelImbalance(2, positive_fractions=[0.0, 1.0], samples_per_client=30)
    label = {p.id: p.label for p in BINARY}
    sums = [sum(label[i] for i in part) for part in fixed.assign(BINARY, 0).values()]
    assert sums == [0, 30]


@sweep(
    ("settings", "message"),
    [
        ({"delta": 0}, r"partition\.delta must be positive, not 0"),
        ({"positive_fractions": [0.5]}, "one per client"),
        ({"samples_per_client": 400}, "are too few for 2 clients of 400"),
        ({"num_clients": 900}, "does not fit 500 patients"),
        ({"samples_per_client": 0}, "samples_per_client must be 1 or more, or null, not 0"),
    ],
)
def test_bad_label_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        LabelImbalance(**{"num_clients": 2, **settings}).assign(BINARY, 0)


def test_label_imbalance_needs_binary_labels():
    with pytest.raises(ConfigError, match="Patient x has no label; a partition by label"):
        LabelImbalance(1).assign([Patient("x")], 0)
