"""Task modules train centrally, by a plain Trainer on the pooled data of all clients."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

from medfed.config.compose import described
from tests.integration.runs import CLINICAL, data_and_task, imaging

# The data lie in memory: loaders without workers are the point.
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


LINEAR = ("experiment=diabetes_pfednet", *CLINICAL[1:])


@pytest.mark.parametrize("experiment", ["clinical", "imaging", "linear"])
def test_plain_fit(experiment, tmp_path, cohort_root):
    tabular = {"clinical": CLINICAL, "linear": LINEAR}
    overrides = tabular[experiment] if experiment in tabular else imaging(cohort_root)
    data, task = data_and_task(described([*overrides, f"folder={tmp_path}", "optimizer.lr=0.05"]))
    before = {n: t.detach().clone() for n, t in task.network.named_parameters()}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
    )
    first = trainer.validate(task, datamodule=data, verbose=False)[0]["val/loss"]
    trainer.fit(task, datamodule=data)
    metrics = trainer.test(task, datamodule=data, verbose=False)[0]
    assert float(trainer.callback_metrics["test/loss"]) == metrics["test/loss"]
    last = trainer.validate(task, datamodule=data, verbose=False)[0]["val/loss"]
    assert last < first
    assert f"test/{task.selection[0]}" in metrics
    assert any(not torch.equal(t, before[n]) for n, t in task.network.named_parameters())
