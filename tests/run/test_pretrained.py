"""Runs that start from weights: what matched is said, recorded, and outlives its source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from medfed.common.tensors import digest
from medfed.delivery.start.pretrained import Pretrained
from medfed.federation.split import float_entries
from medfed.models.networks.canonical import Canonical
from medfed.run.start import Weights, fit
from medfed.standalone.errors import CheckpointError, ConfigError
from medfed.standalone.files import sha256
from tests.integration.runs import CLINICAL, outcome, resume, run

FEDAVG = (*CLINICAL, "algorithm=fedavg", "rounds=2")


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A finished run whose clients share everything."""
    folder = tmp_path_factory.mktemp("start") / "first"
    run(folder, *FEDAVG)
    return folder


@pytest.fixture(scope="module")
def second(first, tmp_path_factory) -> tuple[Path, Path, str]:
    """A run that started from a copy of it; where its source was, and what it said."""
    source, folder = first.with_name("source"), first.with_name("second")
    shutil.copytree(first, source)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("medfed.run.start.say", lambda _, *lines: said.extend(lines))
        run(folder, *FEDAVG, "seed=1", f"init.weights={source}")
    return folder, source, "\n".join(said)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".ckpt"])
def test_every_format_gives_the_same_weights(suffix, tmp_path):
    state, path = small().state_dict(), tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        # As trainers write it: with an optimizer and NumPy's numbers beside, and prefixes.
        import numpy as np

        inside = {f"module.model.{n}": t for n, t in state.items()}
        beside = {"epoch": 3, "best": np.float64(0.5), "optimizer": {"state": {}}}
        torch.save({**beside, "state_dict": inside} if suffix == ".ckpt" else state, path)
    network = small(1)
    account = fit(network, Pretrained(weights=str(path)).read())
    assert digest(float_entries(network)) == digest(float_entries(small()))
    assert not [*account.missing, *account.unexpected, *account.shapes]
    assert account.share(account.matched) == 1
    assert "".join(account.stripped) == ("module.model." if suffix == ".ckpt" else "")


def test_half_precision_and_doubles_are_taken_in_the_networks_type(tmp_path):
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        path = tmp_path / "w.pt"
        torch.save(small().to(kind).state_dict(), path)
        network = small(1)
        fit(network, Pretrained(weights=str(path)).read())
        assert network[0].weight.dtype == torch.float32
        assert torch.equal(network[0].weight, small()[0].weight.to(kind).float())


def test_other_classes_keep_their_random_start_and_it_is_said():
    network = small(1)
    network[2] = head = nn.Linear(4, 5)
    before = head.weight.detach().clone()
    account = fit(network, Weights({**small().state_dict(), "extra": torch.ones(1)}, "", {}))
    assert torch.equal(head.weight, before)
    assert account.shapes == {"2.weight": ((2, 4), (5, 4)), "2.bias": ((2,), (5,))}
    assert account.unexpected == ["extra"]
    text = "\n".join(account.lines())
    assert "2.weight is (2, 4) in the file and (5, 4) here: it keeps its random start" in text
    assert "no entry for extra." in text
    shares = [account.share(names) for names in (account.matched, account.shapes)]
    assert shares == [pytest.approx(32 / 57), pytest.approx(25 / 57)]


def test_parts_and_prefixes_are_chosen():
    there = {f"old.{n}": t for n, t in small().state_dict().items()}
    network = small(1)
    account = fit(network, Weights(there, "", {}), part=["0.weight"], rename={"old.": ""})
    assert account.matched == ["0.weight"]
    assert set(account.left) == set(float_entries(network)) - {"0.weight"}
    assert torch.equal(network[2].weight, small(1)[2].weight)
    with pytest.raises(ConfigError, match=r"no name starts with 'new\.'"):
        fit(network, Weights(there, "", {}), rename={"new.": ""})


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
@pytest.mark.parametrize("parts", [["2.*"], ["*"]], ids=["head", "whole"])
def test_canonical_instances_get_the_weights_and_stay_distinct(mix, parts):
    network = Canonical([small(k) for k in (1, 2, 3)], parts, mix=mix)
    account = fit(network, Weights(small().state_dict(), "", {}), spread=0.1, seed=0)
    assert not account.missing
    entries, plain = float_entries(network), float_entries(small())
    for name, entry in entries.items():
        if name == "membership":
            assert torch.equal(entry, torch.full((3,), 1 / 3))
            continue
        wanted = plain[str(network.ordinary(name))]
        noise = (entry - wanted).detach()
        if name.startswith(("canonical.1", "canonical.2")) and isinstance(entry, nn.Parameter):
            assert bool(noise.any()) == bool(wanted.any())  # relative to the entry
            assert noise.abs().max() <= 0.6 * wanted.detach().square().mean().sqrt()
        else:
            assert not noise.any()
    again = Canonical([small(k) for k in (1, 2, 3)], parts, mix=mix)
    fit(again, Weights(small().state_dict(), "", {}), spread=0.1, seed=0)
    assert digest(float_entries(again)) == digest(entries)
    heads = [t for n, t in entries.items() if n.endswith("2.weight")]
    assert not torch.equal(heads[1], heads[2])
    # A source of canonical models gives each instance its own.
    fit(again, Weights({n: t.detach() for n, t in entries.items()}, "", {}), spread=0.1, seed=1)
    assert digest(float_entries(again)) == digest(entries)


def test_a_run_starts_from_a_run(first, second):
    folder, source, said = second
    models = [safetensors.torch.load_file(p) for p in (first / "models").iterdir()]
    start = safetensors.torch.load_file(folder / "start.safetensors")
    assert digest(start) == digest(models[0])
    record = json.loads((folder / "start.json").read_text())
    assert record["shares"]["matched"] == 1
    assert all(sha256(Path(file)) == sha for file, sha in record["files"].items())
    assert f"Starts from {source}, what the clients of a run have in common." in said
    assert "100.00% of its weights" in said


def test_one_clients_model_or_what_all_have_in_common(first, tmp_path):
    """Of models that differ only the shared part of the server is common."""
    folder = tmp_path / "run"
    shutil.copytree(first, folder)
    one, *_ = sorted((folder / "models").iterdir())
    shared = safetensors.torch.load_file(one)
    other = {n: t + 1 for n, t in shared.items()}
    safetensors.torch.save_file(other, one)
    own = Pretrained(weights=str(folder), client=one.stem).read()
    assert digest(own.tensors) == digest(other)
    common = Pretrained(weights=str(folder)).read().tensors
    assert digest(common) == digest(shared)
    (folder / "checkpoints" / "best.ckpt").unlink()
    with pytest.raises(CheckpointError, match=r"choose one's by init\.client=NAME, of hospital_"):
        Pretrained(weights=str(folder)).read()
    with pytest.raises(ConfigError, match="did you mean hospital_"):
        Pretrained(weights=str(folder), client="hospitl_0").read()


def test_what_is_resumed_needs_no_source(second, tmp_path):
    straight, source, _ = second
    folder, overrides = tmp_path / "resumed", (*FEDAVG, "seed=1", f"init.weights={source}")
    shutil.copytree(straight, folder)
    for path in (folder / "checkpoints").glob("round_00001*"):
        path.unlink()
    for path in (source / "models").iterdir():
        path.write_bytes(path.read_bytes() + b" ")
    resume(folder, *overrides)
    assert outcome(folder) == outcome(straight)
    source.rename(tmp_path / "elsewhere")
    resume(folder, *overrides)
    assert outcome(folder)["models"] == outcome(straight)["models"]


def test_what_does_not_fit_stops_the_run(first, tmp_path):
    torch.save(small().state_dict(), tmp_path / "other.pt")
    with pytest.raises(
        CheckpointError, match=r"no entry that fits: the network has linear\.weight"
    ):
        run(tmp_path / "run", *FEDAVG, f"init.weights={tmp_path / 'other.pt'}")
    state = safetensors.torch.load_file(next((first / "models").iterdir()))
    state["more"] = torch.ones(1)
    torch.save(state, tmp_path / "more.pt")
    with pytest.raises(
        CheckpointError, match=r"as init\.strict=true requires: This network has no en"
    ):
        run(
            tmp_path / "run",
            *FEDAVG,
            f"init.weights={tmp_path / 'more.pt'}",
            "init.strict=true",
        )
    with pytest.raises(ConfigError, match=r"init\.part=personal: this method has no personal"):
        run(tmp_path / "run", *FEDAVG, f"init.weights={first}", "init.part=personal")
    assert not (tmp_path / "run" / "config.yaml").exists()
