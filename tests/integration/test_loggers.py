"""Where per-round metrics go: a CSV file, Weights & Biases without a network, or nowhere."""

from __future__ import annotations

import csv
import os

import pytest
import wandb
from omegaconf import OmegaConf
from pytorch_lightning.loggers import CSVLogger, WandbLogger

from medfed.run.results import end_logging
from tests.integration.runs import CLINICAL, left_in, run


def test_csv(tmp_path):
    folder = tmp_path / "run"
    _, experiment = run(folder, *CLINICAL, "logger=csv")
    assert isinstance(experiment.trainer.logger, CSVLogger)
    with (folder / "log" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    scores = {
        int(r["step"]): float(r["val/hospital_3/auroc"]) for r in rows if r["val/hospital_3/auroc"]
    }
    record = {
        r.round: r.metrics["auroc"]
        for r in experiment.evaluation.history
        if r.client == "hospital_3"
    }
    assert scores == record
    assert set(record) == {0, 1, 2}
    sent = [float(r["bytes/up"]) for r in rows if r["bytes/up"]]
    ledger = experiment.module.federation.ledger
    assert sent == [ledger.total(round=n, direction="up") for n in range(3)]
    saved = OmegaConf.load(folder / "log" / "version_0" / "hparams.yaml")
    assert saved.algorithm.strength == experiment.config.algorithm.strength


def test_none(tmp_path):
    _, experiment = run(tmp_path / "run", *CLINICAL, "rounds=1", "logger=none")
    assert experiment.trainer.logger is None
    assert not any(name.startswith(("log", "wandb")) for name in left_in(tmp_path / "run"))


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    """A machine on which nobody has logged in to W&B."""
    for name in [n for n in os.environ if n.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "")  # put back afterwards: Lightning sets it
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield
    wandb.teardown()


def test_wandb_offline(no_account, monkeypatch, tmp_path):
    images, numbers, config = [], {}, {}
    log_image, log_metrics = WandbLogger.log_image, WandbLogger.log_metrics
    log_hyperparams = WandbLogger.log_hyperparams

    def image(self, key, images_=None, **options):
        images.append(key)
        return log_image(self, key, options.pop("images", images_), **options)

    def metrics(self, values, step=None):
        numbers.setdefault(step, {}).update(values)
        return log_metrics(self, values, step)

    def hyperparams(self, params):
        config.update(params)
        return log_hyperparams(self, params)

    monkeypatch.setattr(WandbLogger, "log_image", image)
    monkeypatch.setattr(WandbLogger, "log_metrics", metrics)
    monkeypatch.setattr(WandbLogger, "log_hyperparams", hyperparams)
    folder = tmp_path / "run"
    _, experiment = run(folder, *CLINICAL, "rounds=2", "logger=wandb")
    assert isinstance(experiment.trainer.logger, WandbLogger)
    assert wandb.run is None  # the run has ended
    assert config["algorithm"]["strength"] == experiment.config.algorithm.strength
    assert set(numbers) == {0, 1, None}
    for values in (numbers[0], numbers[1]):
        assert {"val/hospital_0/auroc", "val/balanced_accuracy"} <= set(values)
        assert values["bytes/up"] > 0
    assert sorted(images) == ["bytes", "graph", "val_auroc"]
    wandb.teardown()  # waits for the process that writes the file
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (record,) = offline.glob("*.wandb")
    written = record.read_bytes()
    for name in (b"val/hospital_0/auroc", b"bytes/up_total", b"strength"):
        assert name in written
    assert len(list((offline / "files" / "media" / "images").glob("*.png"))) == 3


def test_only_wandb_is_sent_pictures(tmp_path):
    end_logging(None, {"a": tmp_path / "a.png"})
    end_logging(CSVLogger(tmp_path), {"a": tmp_path / "a.png"})
    assert left_in(tmp_path) == []
