"""A task of one's own is one file and one yaml, both outside of the package."""

from __future__ import annotations

import csv
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.models.task import TaskModule, WholeSplit
from medfed.reports.report import report_runs
from medfed.run.evaluation import evaluate_run
from medfed.run.train import train
from medfed.run.trial import try_model
from medfed.standalone.errors import ConfigError
from medfed.standalone.mixture import Activation
from tests.registered import register

YAML = """
_target_: tests.run.test_own_task.MarginTask
_convert_: all
network:
  _target_: medfed.models.networks.small.SmallCNN
  spatial_dims: ${spatial_dims}
  in_channels: ${in_channels}
  out_channels: ${out_channels}
  channels: [4, 4, 4]
optimizer: ${optimizer}
scheduler: ${scheduler}
"""
DIGITS = ("experiment=digits_pfednet", "model=margin", "partition=round_robin")
SMALL = ("partition.num_clients=3", "local.steps=2", "logger=none", "progress=false")


class MarginTask(TaskModule):
    """Classes apart by a margin, as a support vector machine has them."""

    activation: ClassVar[Activation] = "softmax"
    default_selection: ClassVar[tuple[str, str]] = ("hits", "max")

    def criterion(self, logits: Tensor, label: Tensor) -> Tensor:
        return F.multi_margin_loss(logits, label)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)

    def meter(self, *, test: bool = False) -> WholeSplit:
        return WholeSplit(self.criterion, ("hits",), hits)


def hits(logits: Tensor, label: Tensor) -> dict[str, float]:
    return {"hits": (logits.argmax(1) == label).float().mean().item()}


@pytest.mark.parametrize(
    "method", [("algorithm=pfednet",), ("algorithm=ppfl", "canonical=outputs")]
)
def test_a_task_from_outside_is_trained_measured_and_compared(tmp_path, method):
    register("tests.run.test_own_task")
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "margin.yaml").write_text(YAML)
    found = [f"plugins={tmp_path / 'own'}", *DIGITS, *SMALL, *method]
    folder = tmp_path / "run"
    summary, experiment = train(described([*found, "rounds=2", f"folder={folder}"]))
    assert type(experiment.task).__name__ == "MarginTask"
    assert summary["selection"] == ["hits", "max"]
    assert all(set(m) == {"loss", "hits"} for m in summary["clients"].values())
    assert evaluate_run(folder)["clients"] == summary["clients"]
    report_runs(str(folder), tmp_path / "report")
    with (tmp_path / "report" / "comparison.csv").open() as file:
        rows = {(r["metric"], r["place"]): float(r["value"]) for r in csv.DictReader(file)}
    assert rows["hits", "mean"] == summary["federation"]["hits"]["mean"]
    keys = [f"run={folder}", f"out={tmp_path / 'out'}", f"plugins={tmp_path / 'own'}"]
    with pytest.raises(ConfigError, match=r"cannot predict by model._target_=\S+MarginTask"):
        export_run(checked(load(keys, "export")))


def test_a_run_whose_plugin_has_changed_says_so_wherever_it_is_opened(tmp_path, caplog):
    register("tests.run.test_own_task")
    yaml = tmp_path / "own" / "model" / "margin.yaml"
    yaml.parent.mkdir(parents=True)
    yaml.write_text(YAML)
    folder, own = tmp_path / "run", f"plugins={tmp_path / 'own'}"
    keys = [own, *DIGITS, *SMALL, "algorithm=local", "rounds=1"]
    train(described([*keys, f"folder={folder}"]))
    export = checked(load([f"run={folder}", f"out={tmp_path / 'out'}", own], "export"))

    def opened():
        caplog.clear()
        evaluate_run(folder)
        yield caplog.text
        caplog.clear()
        train(described([*keys, f"folder={folder}", f"resume={folder}"]))
        yield caplog.text
        caplog.clear()
        with pytest.raises(ConfigError, match="cannot predict by"):
            export_run(export)
        yield caplog.text

    sentence = f"Files in {tmp_path / 'own'} have changed since the run in {folder} began; if"
    assert not any("have changed" in said for said in opened())
    yaml.write_text(YAML + "# changed\n")
    assert all(sentence in said for said in opened())


def task_with(**functions):
    """A task with functions of a user's, on a linear network of two classes."""
    made = type("Own", (MarginTask,), functions)
    return made(nn.Linear(4, 2), partial(torch.optim.SGD, lr=0.1))


def meter_of(measure):
    return lambda self, *, test=False: WholeSplit(self.criterion, ("hits",), measure)


@pytest.mark.parametrize(
    "name", ["evaluate", "training_step", "validation_step", "configure_optimizers"]
)
def test_what_a_run_would_not_call_is_refused(name):
    with pytest.raises(ConfigError, match=f"A task cannot override {name}, as Own does; write"):
        task_with(**{name: lambda self, *_: None})


def test_a_meter_is_new_for_each_split():
    def meter(self, *, test=False):
        self.only = getattr(self, "only", None) or meter_of(hits)(self)
        return self.only

    with pytest.raises(ConfigError, match=r"Own.meter must return a new meter at each call"):
        task_with(meter=meter).check_parts({})


BATCH = {"image": torch.randn(6, 4), "label": torch.arange(6) % 2}


@pytest.mark.parametrize(
    "of", [torch.as_tensor, np.float32, np.float64, float], ids=lambda of: of.__name__
)
def test_metrics_are_plain_numbers(of):
    task = task_with(meter=meter_of(lambda logits, label: {"hits": of(0.5)}))
    found = task.evaluate([BATCH])
    assert found["hits"] == 0.5
    assert {*map(type, found.values())} == {float}


def test_a_meter_measures_by_name():
    task = task_with(meter=meter_of(lambda logits, label: 0.5))
    with pytest.raises(ConfigError, match=r"of a meter gives 0\.5; it must return \{metric"):
        task.evaluate([BATCH])


LOSSES = {
    "per sample": lambda logits, label: F.cross_entropy(logits, label, reduction="none"),
    "by name": lambda logits, label: {"loss": F.cross_entropy(logits, label)},
    "a float": lambda logits, label: 0.5,
    "nothing": lambda logits, label: None,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_criterion_is_one_number(loss):
    client = SimpleNamespace(train_batches=lambda seed: iter([BATCH]))
    task = task_with(criterion=lambda self, logits, label: loss(logits, label))
    with pytest.raises(ConfigError, match="The loss must return one number as a tensor, such as"):
        try_model(task, SimpleNamespace(clients={"a": client}))
