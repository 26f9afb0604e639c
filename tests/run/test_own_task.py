"""A task of one's own is one file and one yaml, both outside of the package."""

from __future__ import annotations

import csv
from typing import ClassVar

import pytest
import torch.nn.functional as F
from torch import Tensor

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.models.task import TaskModule, WholeSplit
from medfed.reports.comparison import compare_runs
from medfed.run.evaluation import evaluate_run
from medfed.run.train import train
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
    compare_runs(str(folder), tmp_path / "report")
    with (tmp_path / "report" / "comparison.csv").open() as file:
        rows = {(r["metric"], r["place"]): float(r["value"]) for r in csv.DictReader(file)}
    assert rows["hits", "mean"] == summary["federation"]["hits"]["mean"]
    keys = [f"run={folder}", f"out={tmp_path / 'out'}", f"plugins={tmp_path / 'own'}"]
    with pytest.raises(ConfigError, match=r"cannot predict by model._target_=\S+MarginTask"):
        export_run(checked(load(keys, "export")))
