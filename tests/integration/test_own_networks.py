"""Networks of anybody's under methods of every kind: trained, resumed to the bit, and personal."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn

from medfed.config.compose import load
from medfed.config.description import checked, describe
from medfed.datamodules.base import FederatedDataModule
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.export.export import export_run
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.reference import run_reference
from medfed.records.folder import Run
from medfed.run.assembly import read_data, task_for
from medfed.run.federating import federate
from medfed.run.train import train
from tests.integration.runs import IMAGING
from tests.registered import register
from tests.toys import assert_alike

QUICK = (
    *("folder=none", "logger=none", "progress=false", "threads=1", "rounds=2", "local.steps=1"),
    *("data.batch_size=2", "optimizer=sgd", "optimizer.lr=0.02", "evaluation.every=1"),
)
BRATS = (
    *(o for o in IMAGING if "network" not in o and "data" not in o),
    *(
        "data.patch_size=[32,32]",
        "data.patches_per_patient=2",
        "model.surface=false",
        "data.generated.hospitals=2",
    ),
    *("data.generated.patients=4", "data.generated.shape=[32,32,8]"),
)
DIGITS = ("experiment=digits_pfednet", "partition=round_robin", "partition.num_clients=2")
NETWORKS = {
    "segresnet": (BRATS, {"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]}),
    "dynunet": (
        BRATS,
        {"filters": [4, 4, 8], "kernel_size": [3, 3, 3], "strides": [1, 2, 2],
         "upsample_kernel_size": [2, 2], "deep_supr_num": 1},
    ),
    "swin_unetr": (
        BRATS,
        {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 2},
    ),
    "resnet": (DIGITS, {"layers": [1, 1, 1, 1], "block_inplanes": [4, 4, 8, 8]}),
    "tied": (DIGITS, {}),
}  # fmt: skip
METHODS = {
    "pfednet": ("algorithm=pfednet",),
    "fedrep": ("algorithm=fedrep",),
    "ppfl": ("algorithm=ppfl", "canonical=outputs", "canonical.count=2"),
    "qupel": ("algorithm=qupel",),
}
# Every network with two kinds of methods, every kind with two networks; tied weights with all.
PAIRS = [
    *(("segresnet", "pfednet"), ("segresnet", "qupel"), ("dynunet", "fedrep"), ("dynunet", "ppfl")),
    *(("swin_unetr", "ppfl"), ("swin_unetr", "qupel"), ("resnet", "pfednet"), ("resnet", "fedrep")),
    *(("tied", method) for method in METHODS),
]


class Tied(nn.Module):
    """What encodes also decodes: one weight in two layers, of which the second is personal."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 6, 3, stride=2)
        self.encode = nn.Linear(6, 6, bias=False)
        self.middle = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(6, out_channels)

    def forward(self, image: Tensor) -> Tensor:
        """Returns the logits."""
        x = self.stem(image).relu().mean((2, 3))
        return self.head(self.decode(self.middle(self.encode(x)).tanh()))


register(__name__)


def composed(name: str, root: Path, *overrides: str) -> DictConfig:
    """A run of a network that is made small."""
    base, sizes = NETWORKS[name]
    model = () if name == "tied" else (f"model={name}",)
    place = (f"data.root={root}",) if base is BRATS else ()
    config = load([*base, *QUICK, *model, *place, *overrides])
    with open_dict(config):
        for key, value in sizes.items():
            config.model.network[key] = value
        if name == "tied":
            shape = {k: f"${{{k}}}" for k in ("in_channels", "out_channels")}
            config.model.network = {"_target_": f"{__name__}.Tied", **shape}
            config.model.personal = ["decode.*", "head.*"]
    return config


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cohort")


@cache
def data_of(name: str, root: Path) -> FederatedDataModule:
    """Read once for all methods."""
    return read_data(describe(composed(name, root)))


def module(name: str, root: Path, *overrides: str) -> FederatedModule:
    config = composed(name, root, *overrides)
    config, task = task_for(describe(config), data_of(name, root))
    return FederatedModule(task, *federate(config, data_of(name, root), task))


def each(cases: Iterable[tuple[str, ...]]) -> list[object]:
    """Cases of networks; the two that take longest are for ``make test-long``."""
    marks = {name: [pytest.mark.long] for name in ("swin_unetr", "dynunet")}
    return [pytest.param(*case, marks=marks.get(case[0], [])) for case in cases]


@pytest.mark.parametrize(("name", "method"), each(PAIRS))
def test_two_rounds_and_resumed_to_the_bit(name: str, method: str, root: Path) -> None:
    run = module(name, root, *METHODS[method])
    before = {c: v.weights for c, v in run.federation.clients.items()}
    run_reference(run.federation, 1)
    saved: dict[str, object] = {}
    run.next_round = 1
    run.on_save_checkpoint(saved)
    torch.save(saved, file := io.BytesIO())
    run_reference(run.federation, 2, start=1)
    again = module(name, root, *METHODS[method])
    again.restore(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    run_reference(again.federation, 2, start=1)
    assert again.federation.digests() == run.federation.digests()
    for client in run.federation.ids:
        model = run.federation.personal_model(client)
        assert all(bool(torch.isfinite(t).all()) for t in model.values())
        assert any(not torch.equal(t, before[client][n]) for n, t in model.items())


@pytest.mark.parametrize("name", each((name,) for name in NETWORKS))
def test_fedper_is_not_fedavg(name: str, root: Path) -> None:
    found = []
    for method in ("fedper", "fedavg"):
        run = module(name, root, f"algorithm={method}")
        run_reference(run.federation, 1)
        found.append(run)
    fedper, fedavg = (r.federation for r in found)
    assert fedper.digests()["server"] != fedavg.digests()["server"]
    own = fedper.clients[fedper.ids[0]].split.personal
    models = [fedper.personal_model(c) for c in fedper.ids]
    assert own
    assert any(not torch.equal(models[0][n], models[1][n]) for n in own)
    assert fedper.ledger.total(direction="up") < fedavg.ledger.total(direction="up")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hand-written network as a user has it: a module in a folder."""
    folder = tmp_path_factory.mktemp("plugin")
    head = "from torch import Tensor, nn\n\n\n"
    (folder / "tied_network.py").write_text(head + inspect.getsource(Tied))
    return folder


@pytest.mark.parametrize(("name", "method"), [("tied", "fedrep"), ("dynunet", "ppfl")])
def test_a_run_is_exported_and_predicts_the_same(
    name: str, method: str, root: Path, plugin: Path, tmp_path: Path
) -> None:
    more = (f"plugins={plugin}",) if name == "tied" else ()
    config = composed(name, root, *METHODS[method], *more, "rounds=1")
    if name == "tied":
        config.model.network._target_ = "tied_network.Tied"
    config.folder = str(tmp_path / "run")
    train(describe(config))
    run = Run(tmp_path / "run")
    client = next(iter(run.clients))
    export = [f"run={run.folder}", f"client={client}", f"out={tmp_path / 'bundle'}"]
    (folder,) = export_run(checked(load([*export, *more], "export")))
    bundle = read_bundle(folder)
    network = bundle.network()
    side = 32 if NETWORKS[name][0] is BRATS else 8
    image = torch.randn(2, 4 if side == 32 else 1, side, side)
    with torch.no_grad():
        assert_alike(network(image), run.model(client)(image))
