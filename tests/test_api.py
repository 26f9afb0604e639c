"""The Python door: a run as the command trains it, and a federation without configurations."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import medfed
from medfed.common.processes import set_threads, threads_as_before
from medfed.config.description import describe
from medfed.federation.algorithm import Cohort
from medfed.federation.wire.channel import Channel, Link
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.standalone.errors import CheckpointError, ConfigError, DataError, MedfedError
from tests.integration.runs import CLINICAL, data_and_task, run
from tests.pages import DOCS


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with keys of each spelling."""
    folder = tmp_path_factory.mktemp("api") / "a run"
    torch.set_num_threads(2)
    try:
        done = medfed.train(*CLINICAL, rounds=2, local__steps=3, folder=folder)
        assert torch.get_num_threads() == 2  # the run takes one, and gives them back
    finally:
        torch.set_num_threads(1)
    return done


def test_a_run_is_what_the_command_makes(trained, tmp_path):
    summary, _ = run(tmp_path / "run", *CLINICAL, "rounds=2", "local.steps=3")
    assert trained.summary["clients"] == summary["clients"]
    assert trained.ledger.entries == medfed.Run(tmp_path / "run").ledger.entries


def test_a_run_tells_what_its_folder_holds(trained):
    assert trained.config.rounds == 2
    assert trained.config.local.steps == 3
    splits = json.loads((trained.folder / "splits.json").read_text())
    assert trained.clients == tuple(splits["clients"]) == tuple(trained.patients)
    rows = [r for r in trained.metrics if r["client"] == trained.clients[0]]
    splits = ("val", "val", "train", "train", "test")
    assert [(r["round"], r["split"]) for r in rows] == [*zip((0, 1, 0, 1, 1), splits, strict=True)]
    assert all(isinstance(r["loss"], float) for r in rows)
    assert trained.ledger.total() == sum(trained.summary["bytes"].values())
    assert all(path.is_file() for path in trained.pictures.values())
    assert {"graph", "bytes"} <= trained.pictures.keys()


def test_a_model_is_the_clients_own(trained):
    """Its test loss is the one that the summary holds."""
    data, _ = data_and_task(describe(trained.config))
    name = trained.clients[1]
    model = trained.model(name)
    assert not model.training
    (batch,) = data.clients[name].eval_batches("test")
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
    assert float(loss) == pytest.approx(trained.summary["clients"][name]["loss"], abs=1e-6)
    before = torch.get_rng_state()
    trained.model(name)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError, match=r"has no client hospital_9 \(did you mean .*; it has"):
        trained.model("hospital_9")


def test_a_finished_run_is_opened_by_its_folder(trained, tmp_path):
    assert medfed.Run(str(trained.folder)).summary == trained.summary
    with pytest.raises(CheckpointError, match="is no run folder"):
        medfed.Run(tmp_path)


def test_a_run_is_resumed(tmp_path, monkeypatch):
    """Stopped in its third round it comes to what a straight one comes to."""
    straight = medfed.train(*CLINICAL, rounds=4, folder=tmp_path / "straight")
    with monkeypatch.context() as patch:
        patch.setattr(Cohort, "of", stop_at(2))
        on_interrupt = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            medfed.train(*CLINICAL, rounds=4, folder=tmp_path / "stopped")
        assert signal.getsignal(signal.SIGINT) == on_interrupt
    with pytest.raises(ConfigError, match="is not empty; name an empty one, or resume=FOLDER"):
        medfed.train(*CLINICAL, rounds=4, folder=tmp_path / "stopped")
    done = medfed.train(*CLINICAL, rounds=4, resume=tmp_path / "stopped")
    assert done.folder == tmp_path / "stopped"
    assert done.summary["clients"] == straight.summary["clients"]
    assert done.ledger.entries == straight.ledger.entries


def test_another_run_is_refused_before_any_data_are_made(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the default experiment would make its cohort
    with pytest.raises(CheckpointError, match=r"has another configuration \(name: clinical"):
        medfed.train(resume=trained.folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "keys", "error", "sentence"),
    [
        (["experiment=clinic"], {}, ConfigError, "Unknown experiment 'clinic'"),
        ([*CLINICAL], {"roundz": 1}, ConfigError, "Unknown key 'roundz'"),
        ([*CLINICAL], {"local__steps": "many"}, ConfigError, "local.steps must be a whole number"),
        ([*CLINICAL], {"algorithm__lam": -1.0}, ConfigError, "algorithm.lam"),
        ([*CLINICAL], {"data__path": "/no/such, [file]=x"}, DataError, "/no/such, [file]=x does"),
    ],
)
def test_mistakes_are_errors_of_one_sentence(overrides, keys, error, sentence, tmp_path):
    with pytest.raises(MedfedError) as caught:
        medfed.train(*overrides, folder=tmp_path / "run", **keys)
    assert type(caught.value) is error
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; name an empty one, or resume=FOLDER"):
        medfed.train(*CLINICAL, folder=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_importing_medfed_loads_no_library():
    code = "import sys, medfed; print(*[m for m in ('torch', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert set(medfed.__all__) <= set(dir(medfed))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = medfed.trian


def stop_at(last):
    """A draw of clients at which the user stops the run."""
    draw = Cohort.of

    def of(self, clients, seed, number):
        if number >= last:
            raise KeyboardInterrupt
        return draw(self, clients, seed, number)

    return of


def arrays(count=3, rows=20):
    g = torch.Generator().manual_seed(0)
    return [
        medfed.ArrayClient(
            f"site_{i}",
            torch.randn(rows, 4, generator=g),
            torch.randn(rows, 1, generator=g),
            batch_size=rows,
        )
        for i in range(count)
    ]


def squares(network, batch):
    return (network(batch["image"]) - batch["label"]).square().mean()


def linear(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Linear(4, 1, dtype=dtype)


def test_federate_equals_full_batch_descent_by_hand():
    """FedAvg with whole batches and one step is gradient descent on all rows."""
    clients = [
        medfed.ArrayClient(c.id, c.inputs.double(), c.labels.double(), c.batch_size)
        for c in arrays()
    ]
    network = linear()
    start = {n: p.detach().clone() for n, p in network.named_parameters()}
    done = medfed.federate(FedAvg(), network, squares, clients, rounds=5, steps=1, lr=0.05)
    x = torch.cat([c.inputs for c in clients])
    y = torch.cat([c.labels for c in clients])
    w, b = start["weight"].clone(), start["bias"].clone()
    for _ in range(5):
        rest = x @ w.T + b - y
        w, b = w - 0.05 * 2 * (rest.T @ x) / len(x), b - 0.05 * 2 * rest.mean(0)
    for client in clients:
        model = done.model(client.id)
        torch.testing.assert_close(model.weight, w, rtol=0, atol=1e-7)
        torch.testing.assert_close(model.bias, b, rtol=0, atol=1e-7)
    assert torch.equal(network.weight, start["weight"])  # a copy was trained


def test_federate_takes_a_name_and_one_pattern():
    network = torch.nn.Sequential(linear(torch.float32), torch.nn.Linear(1, 1))
    named, plain = (
        medfed.federate(method, network, squares, arrays(), rounds=1, steps=1, personal=part)
        for method, part in (("fedper", "1.*"), (FedPer(), ["1.*"]))
    )
    assert named.federation.digests() == plain.federation.digests()
    with pytest.raises(ConfigError, match=r"Unknown algorithm 'fedprr' \(did you mean fedper"):
        medfed.federate("fedprr", network, squares, arrays())


def test_federate_takes_a_channel_and_tells_every_round():
    rounds = []
    done = medfed.federate(
        Ditto(strength=0.1),
        linear(torch.float32),
        squares,
        arrays(),
        rounds=2,
        steps=1,
        channel=Channel(up=Link(), down=Link()),
        after_round=lambda number, so_far: rounds.append((number, so_far.ledger.total())),
    )
    assert [number for number, _ in rounds] == [0, 1]
    assert 0 < rounds[0][1] < rounds[1][1] <= done.ledger.total()
    with pytest.raises(ConfigError, match=r"client='site_7' is unknown .*site_0, site_1"):
        done.weights("site_7")


@pytest.fixture(scope="module")
def page():
    """The names that the code of the page leaves, which runs as it stands there."""
    text = (DOCS / "python.md").read_text()
    names = {}
    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytorch_lightning.trainer.trainer.log", logging.getLogger("quiet"))
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(block, names)
    return names


def test_hospitals_of_data_sets_and_loaders(page):
    """MONAI's dictionaries and a loader's pairs train together; a seed gives an epoch."""
    north, _, west = page["hospitals"]
    for hospital in (north, west):
        one, again, other = (list(hospital.train_batches(seed)) for seed in (1, 1, 2))
        assert [len(b["image"]) for b in one] == [4, 4]
        assert all(list(b)[:2] == ["image", "label"] for b in one)
        assert all(type(b["image"]) is torch.Tensor for b in one)
        assert all(torch.equal(a["image"], b["image"]) for a, b in zip(one, again, strict=True))
        assert not all(torch.equal(a["image"], b["image"]) for a, b in zip(one, other, strict=True))
        assert torch.equal(hospital.train_inputs(3).isnan().any(), torch.tensor(False))
    assert page["done"].losses("test").keys() == {"north", "south", "west"}
    model, (batch,) = page["done"].model("west"), west.eval_batches("test")
    loss = float(page["loss"](model, batch).detach())
    assert page["done"].losses("test")["west"] == pytest.approx(loss, abs=1e-6)
    # The decoder of MONAI's U-Net is personal by default.
    done = medfed.federate("fedper", page["network"], page["loss"], [north, west], rounds=1)
    assert all(n.startswith("model.2.") for n in done.federation.clients["north"].split.personal)


def test_a_lightning_trainer_of_the_user_gives_the_bits_of_federate(page):
    torch.manual_seed(3)
    start = page["UNet"](2, 1, 1, channels=(4, 8), strides=(2,))
    keys = {"rounds": 2, "steps": 3, "lr": 0.1}
    plain = medfed.federate("ditto", start, page["loss"], page["hospitals"], **keys)
    task = page["Task"](start)
    federation, local = page["assemble"](
        Ditto(),
        start,
        task.loss,
        page["hospitals"],
        optimizer=partial(torch.optim.SGD, lr=0.1),
        rounds=2,
        budget=page["LocalBudget"](steps=3),
    )
    module = page["FederatedModule"](task, federation, local)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = page["pl"].Trainer(
        accelerator="cpu",
        max_epochs=2,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[page["FederatedRounds"](), page["PersonalEvaluation"]("dice")],
        **quiet,
    )
    trainer.fit(module)
    assert federation.digests() == plain.federation.digests()
    assert set(page["evaluation"].test) == {"north", "south", "west"}
    assert page["evaluation"].history.rounds == [0, 1]


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ([], "Hospital a: train is of the type list, without a length or without a sample"),
        (iter(()), "of the type tuple_iterator, without a length"),
        ([{"ct": torch.zeros(1)}], "a batch is a dict with ct; give pairs of image and label"),
        ([torch.zeros(1)], "Hospital a: a batch is a Tensor; give pairs of image and label"),
    ],
)
def test_samples_that_no_hospital_can_have(train, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        list(medfed.Hospital("a", train).train_batches(0))
    assert "\n" not in str(caught.value)


def test_several_crops_of_a_sample_are_samples():
    crops = [
        [{"image": torch.full((1, 4), float(k)), "label": torch.tensor(k)}] * 2 for k in (0, 1)
    ]
    hospital = medfed.Hospital("a", crops, batch_size=2)
    (batch,) = hospital.eval_batches("train")
    assert batch["label"].tolist() == [0, 0, 1, 1]
    assert hospital.label_counts.tolist() == [2, 2]
    assert hospital.channels.tolist() == [True]
    done = medfed.federate(
        "fedavg", linear(torch.float32), lambda n, b: n(b["image"]).square().mean(), [hospital]
    )
    with pytest.raises(ConfigError, match=r"Client a has no test data; give it some"):
        done.losses("test")


@pytest.mark.parametrize("method", ["fedem", "ifca", "ppfl"])
def test_a_list_of_networks_are_the_models_of_methods_that_train_several(method):
    def hospital(name, sign):
        images = torch.randn(40, 3)
        labels = (sign * images[:, 0] > 0).long()
        return medfed.Hospital(name, [*zip(images, labels, strict=True)])

    def loss(network, batch):
        return torch.nn.functional.cross_entropy(network(batch["image"]), batch["label"])

    torch.manual_seed(0)
    clients = [hospital("a", 1), hospital("b", 1), hospital("c", -1), hospital("d", -1)]
    networks = [torch.nn.Linear(3, 2) for _ in range(2)]
    start = [n.weight.tolist() for n in networks]
    done = medfed.federate(method, networks, loss, clients, rounds=10, lr=0.5)
    assert [n.weight.tolist() for n in networks] == start
    chosen = [int(done.model(c).membership.argmax()) for c in "abcd"]
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]
    with pytest.raises(ConfigError, match="a list of networks"):
        medfed.federate(method, networks[0], loss, clients)


def test_levels_of_hospitals_are_their_own_and_drawn_towards_zero():
    """A common network knows no hospital: shifts of the outcomes' odds come back, shrunk."""
    torch.manual_seed(0)
    shifts, hospitals = {"low": -1.0, "middle": 0.0, "high": 1.0}, []
    for name, shift in shifts.items():
        features = torch.randn(900, 3)
        chance = (features[:, 0] + shift).sigmoid()
        data = torch.utils.data.TensorDataset(features, torch.bernoulli(chance).long())
        parts = torch.utils.data.random_split(data, [300, 300, 300])
        loaders = [torch.utils.data.DataLoader(part, 150) for part in parts]
        hospitals.append(medfed.Hospital(name, *loaders))

    def loss(network, batch):
        return torch.nn.functional.cross_entropy(network(batch["image"]), batch["label"])

    done = medfed.federate("fedavg", torch.nn.Linear(3, 2), loss, hospitals, rounds=4, lr=2.0)
    levels = done.levels()
    assert levels == pytest.approx(shifts, abs=0.35)
    assert levels["low"] < -0.4 < 0.4 < levels["high"]
    three = medfed.federate("local", torch.nn.Linear(3, 3), loss, hospitals, rounds=1)
    with pytest.raises(ConfigError, match=r"two classes, with logits \(B, 2\), not \(150, 3\)"):
        three.levels()


def test_a_run_sets_the_threads_of_blas_and_gives_them_back():
    def threads():
        return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]

    with threadpool_limits(2, "blas"):
        before = threads(), torch.get_num_threads()
        assert before[0]
        with threads_as_before():
            set_threads(1)
            assert {*threads(), torch.get_num_threads()} == {1}
        assert (threads(), torch.get_num_threads()) == before
