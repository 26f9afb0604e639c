"""Where metrics go: CSV, Weights & Biases without a network, TensorBoard, MLflow, or nowhere."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
import wandb
from omegaconf import OmegaConf
from pytorch_lightning.loggers import CSVLogger, WandbLogger

from medfed.records.folder import Run
from medfed.run.loggers import end_logging, wandb_logger
from medfed.standalone.errors import ConfigError, NonFiniteError
from tests.integration.runs import CLINICAL, left_in, resume, run
from tests.pages import ROOT


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
    losses = [float(r["train/hospital_3/loss"]) for r in rows if r["train/hospital_3/loss"]]
    record = [r for r in experiment.evaluation.losses if r.client == "hospital_3"]
    assert losses == [r.metrics["loss"] for r in record]
    assert [r.round for r in record] == [0, 1, 2]
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
    for node in ("platform.node", "socket.gethostname"):
        monkeypatch.setattr(node, lambda: "machine-of-a-hospital")
    folder = tmp_path / "run"
    _, experiment = run(folder, *CLINICAL, "rounds=2", "logger=wandb", "pictures.format=png")
    assert isinstance(experiment.trainer.logger, WandbLogger)
    assert wandb.run is None  # the run has ended
    assert config["algorithm"]["strength"] == experiment.config.algorithm.strength
    assert set(numbers) == {0, 1, None}
    run_ = experiment.trainer.logger
    assert (run_._wandb_init["group"], run_.name) == ("clinical", "medfed")
    assert run_._wandb_init["name"] == "clinical pfednet seed 0"
    assert "anonymous" not in run_._wandb_init  # W&B warns of it on the terminal
    assert run_._wandb_init["tags"] == ["pfednet", "seed 0"]
    for values in (numbers[0], numbers[1]):
        assert {"val/hospital_0/auroc", "val/balanced_accuracy", "train/loss"} <= set(values)
        assert values["bytes/up"] > 0
    assert sorted(images) == ["bytes", "graph", "val_auroc"]
    wandb.teardown()  # waits for the process that writes the file
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (record,) = offline.glob("*.wandb")
    written = record.read_bytes()
    for name in (b"val/hospital_0/auroc", b"bytes/up_total", b"strength"):
        assert name in written
    for name in (b"test/hospital_0/auroc", b"selected_round"):
        assert name in written
    assert not list(tmp_path.rglob("staging"))  # the home of this test
    for name in ("machine-of-a-hospital", str(tmp_path), os.getcwd()):
        assert name.encode() not in written
    assert len(list((offline / "files" / "media" / "images").glob("*.png"))) == 3


def test_a_resumed_run_is_the_same_one_for_wandb(no_account, tmp_path):
    short = (*CLINICAL, "logger=wandb", "local.steps=1", "rounds=2")
    run(tmp_path / "run", *short)
    known = json.loads((tmp_path / "run" / "logger.json").read_text())["wandb"]
    (tmp_path / "run" / "summary.json").unlink()
    _, again = resume(tmp_path / "run", *short)
    assert again.trainer.logger.version == known
    assert again.trainer.logger._wandb_init["resume"] == "allow"
    run(tmp_path / "other", *short)
    assert json.loads((tmp_path / "other" / "logger.json").read_text())["wandb"] != known


def test_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    short = (*CLINICAL, "logger=tensorboard", "local.steps=1", "rounds=2", "pictures.format=png")
    _, experiment = run(tmp_path / "run", *short)
    (tmp_path / "run" / "summary.json").unlink()
    resume(tmp_path / "run", *short)
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    tags = events.Tags()
    assert {"val/auroc", "val/hospital_0/auroc", "bytes/up", "test/auroc"} <= set(tags["scalars"])
    assert {"bytes", "graph"} <= set(tags["images"])
    scores = {e.step: e.value for e in events.Scalars("val/hospital_3/auroc")}
    record = [r for r in experiment.evaluation.history if r.client == "hospital_3"]
    assert scores == pytest.approx({r.round: r.metrics["auroc"] for r in record}, abs=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow", "ignore::DeprecationWarning")
def test_mlflow(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    short = (*CLINICAL, "logger=mlflow", "local.steps=1", "rounds=2", "pictures.format=png")
    with pytest.raises(ConfigError, match=r"logger=mlflow needs a server; set logger.tracking_uri"):
        run(tmp_path / "run", *short)
    # A folder, which stands for a server here, must be allowed.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    run(tmp_path / "run", *short)
    known = json.loads((tmp_path / "run" / "logger.json").read_text())["mlflow"]
    (tmp_path / "run" / "summary.json").unlink()
    resume(tmp_path / "run", *short)
    client = tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "clinical"]
    (found,) = client.search_runs([experiment.experiment_id])  # one run, also after resuming
    assert found.info.run_id == known
    assert found.info.run_name == "clinical pfednet seed 0"
    assert found.data.tags["method"] == "pfednet"
    summary = Run(tmp_path / "run").summary
    auroc = summary["federation"]["auroc"]
    assert found.data.metrics["test/auroc"] == auroc["mean"]
    assert found.data.metrics["test/auroc_worst"] == auroc["worst"]
    assert "test/sensitivity.point" in found.data.metrics
    names = {a.path for a in client.list_artifacts(known, "pictures")}
    assert "pictures/bytes.png" in names
    table = json.loads(
        (tmp_path / "mlruns")
        .joinpath(experiment.experiment_id, known, "artifacts/test.json")
        .read_text()
    )
    rows = {row[0]: dict(zip(table["columns"][1:], row[1:], strict=True)) for row in table["data"]}
    assert rows["hospital_1"]["auroc"] == summary["clients"]["hospital_1"]["auroc"]
    curve = client.get_metric_history(known, "val/hospital_1.auroc")
    assert [point.step for point in curve][:2] == [0, 1]
    assert found.info.status == "FINISHED"
    with pytest.raises(NonFiniteError):
        run(tmp_path / "failed", *short, "optimizer.lr=1e29", "local.steps=5")
    failed = json.loads((tmp_path / "failed" / "logger.json").read_text())["mlflow"]
    assert client.get_run(failed).info.status == "FAILED"


@pytest.mark.parametrize("logger", ["tensorboard", "mlflow", "wandb"])
def test_a_logger_that_is_not_installed(logger, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")

    def absent(*args, **kwargs):
        raise ModuleNotFoundError(f"No module named {logger!r}")

    if logger == "mlflow":
        monkeypatch.setattr("medfed.run.loggers._MLFlow", absent)
    else:
        monkeypatch.setitem(sys.modules, logger, None)
    with pytest.raises(
        ConfigError, match=rf"logger={logger} needs .*clone .* '\.\[{logger}\]', or"
    ):
        run(tmp_path / "run", *CLINICAL, f"logger={logger}")
    assert not (tmp_path / "run").exists()


def test_no_other_logger_needs_wandb(tmp_path):
    """As at a hospital, whose installation has none."""
    code = (
        "import sys; sys.modules['wandb'] = None; from medfed.commands.main import main; "
        f"main(['train', *{list(CLINICAL)!r}, 'rounds=1', 'local.steps=1', "
        f"'hydra.run.dir={tmp_path / 'run'}'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()


def test_the_run_folder_is_enough_for_csv(tmp_path):
    over = {"federation": {"iou": {"mean": 0.5, "worst": 0.4}}, "rounds": 2}
    end_logging(None, {"a": tmp_path / "a.png"}, over)
    end_logging(CSVLogger(tmp_path, name="log"), {"a": tmp_path / "a.png"}, over)
    (table,) = tmp_path.rglob("metrics.csv")
    assert table.read_text() == "step,test/iou,test/iou_worst\n1,0.5,0.4\n"


def test_pictures_as_vectors_or_none(tmp_path):
    for folder in ("a", "b"):
        short = ("rounds=1", "local.steps=1", "pictures.format=pdf")
        run(tmp_path / folder, *CLINICAL, *short)
    drawn = sorted((tmp_path / "a" / "pictures").iterdir())
    stems = {p.stem for p in drawn}
    assert {p.name for p in drawn} == {f"{s}.{kind}" for s in stems for kind in ("png", "pdf")}
    for path in drawn:
        assert path.read_bytes() == (tmp_path / "b" / "pictures" / path.name).read_bytes()
    run(tmp_path / "without", *CLINICAL, *short[:2], "pictures.format=none")
    shown = {n for n in left_in(tmp_path / "a") if not n.startswith("pictures")}
    assert shown == {*left_in(tmp_path / "without")}
    with pytest.raises(ConfigError, match=r"pictures\.format='pdg' is unknown .*choose one of"):
        run(tmp_path / "c", *CLINICAL, "pictures.format=pdg")


@pytest.mark.parametrize("asked", [(), ("contours",)])
def test_pictures_of_patients_are_sent_only_if_asked_for_by_name(
    asked, no_account, monkeypatch, tmp_path
):
    sent = []
    monkeypatch.setattr(WandbLogger, "log_image", lambda self, key, images: sent.append(key))
    logger = wandb_logger("medfed", str(tmp_path), offline=True, pictures=asked)
    summary = {"federation": {}, "clients": {}, "selected_round": 0, "rounds": 1}
    end_logging(logger, {"bytes": tmp_path / "b.png", "contours": tmp_path / "c.png"}, summary)
    assert sent == ["bytes", *asked]
