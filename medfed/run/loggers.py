"""Sends a run's numbers to Weights & Biases, TensorBoard or MLflow, in addition to its folder.

A resumed run continues its log: ``logger.json`` in its folder keeps the run's name in W&B or
MLflow. W&B cannot continue a record without a network, and a killed run leaves it empty. So a file
beside it keeps what was logged, for a new record of all rounds.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import (  # type: ignore[attr-defined]
    rank_zero_experiment,
)
from pytorch_lightning.utilities import rank_zero_only

from medfed.common.console import say, wide_console
from medfed.common.untrusted import read_json
from medfed.records.folder import RunFolder
from medfed.standalone.errors import ConfigError, first_line
from medfed.standalone.files import write_json

OF_PATIENTS = ("contours",)
"""Pictures that show patients."""
_PICTURES_KEY = "pictures_of_patients"
NO_LOGGER = {"_target_": "medfed.run.loggers.no_logger"}


def wandb_logger(
    project: str,
    save_dir: str,
    name: str | None = None,
    group: str | None = None,
    method: str | None = None,
    seed: int | None = None,
    tags: Sequence[str] = (),
    entity: str | None = None,
    offline: bool | None = None,
    pictures: Sequence[str] = (),
) -> WandbLogger:
    """Returns a W&B logger that works offline and without a login unless a key is set.

    It sends neither the terminal's lines, nor the machine's name, nor paths on it.
    """
    with _installed("wandb"):
        import wandb

    if offline is None:
        offline = not os.environ.get("WANDB_API_KEY")
    os.environ.setdefault("WANDB_SILENT", "true")
    if not os.environ.get("WANDB_MODE", "offline"):
        del os.environ["WANDB_MODE"]  # W&B refuses an empty one
    words = _words(method, seed)
    untold = dict.fromkeys(("x_disable_meta", "x_disable_machine_info", "disable_git"), True)
    logger = _Wandb(
        project=project,
        save_dir=save_dir,
        name=name or run_name(group, method, seed) or None,
        id=_known(save_dir, "wandb") or secrets.token_hex(4),
        resume="allow",
        group=group,
        job_type=words[0] if words else None,
        tags=[*words, *map(str, tags)],
        entity=entity,
        mode=os.environ.get("WANDB_MODE") or ("offline" if offline else "online"),
        reinit="create_new",
        settings=wandb.Settings(host="-", console="off", **untold),
    )
    setattr(logger, _PICTURES_KEY, tuple(pictures))
    # Lightning passes on a setting without effect, of which W&B warns on the terminal.
    logger._wandb_init.pop("anonymous", None)
    return logger


class _Wandb(WandbLogger):
    """A W&B logger with a run of its own, whose curves are over rounds."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run, which begins when it is first needed."""
        import wandb

        if self._experiment is None:
            self._record = Path(str(self._save_dir)) / "wandb" / f"logged-{self._id}.jsonl"
            # W&B names folders by the second, so a run that resumes at once would share the folder.
            for folder in self._record.parent.glob(f"offline-run-*-{self._id}"):
                folder.rename(folder.with_name(f"earlier-{folder.name}"))
            self._earlier = [*self._record.parent.glob(f"earlier-offline-run-*-{self._id}")]
            # But for a line that the end of the run before has torn.
            lines = self._record.read_text("utf-8").split("\n") if self._record.is_file() else [""]
            self._missing = [json.loads(line) for line in lines[:-1]]
            try:
                self._experiment = run = wandb.init(**self._wandb_init)
            except wandb.Error as error:
                why = f"W&B does not start: {first_line(error)}"
                raise ConfigError(
                    f"{why}; set WANDB_MODE=offline to keep a record here."
                ) from error
            run.define_metric("round")
            run.define_metric("*", step_metric="round", step_sync=True)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs values of a round, from 0."""
        run = self.experiment
        self.replay(step)
        super().log_metrics(metrics if step is None else {**metrics, "round": step}, step)
        if run.settings._offline and step is not None:
            with self._record.open("a", encoding="utf-8") as file:
                file.write(json.dumps([step, {n: float(v) for n, v in metrics.items()}]) + "\n")

    def replay(self, before: int | None = None) -> None:
        """Logs the rounds of the record that this one continues, and removes that record."""
        missing, self._missing = self._missing, []
        if not missing:
            return
        self._record.unlink()
        for step, values in missing:
            if before is None or step < before:
                self.log_metrics(values, step)
        for folder in self._earlier:
            shutil.rmtree(folder)

    def end(self, failed: bool) -> None:
        """Ends the run, and says how to send an offline one."""
        if self._experiment is None:
            return
        self.replay()
        run = self._experiment
        run.finish(exit_code=int(failed))
        if run.settings._offline:
            folder = shlex.quote(str(Path(run.dir).parent))
            say(wide_console(), f"To send the W&B record: wandb sync {folder}")


def tensorboard_logger(save_dir: str, name: str = "tensorboard") -> TensorBoardLogger:
    """Returns a TensorBoard logger, which writes into the run folder."""
    with _installed("tensorboard"):
        import tensorboard  # type: ignore[import-untyped]  # noqa: F401

        return TensorBoardLogger(save_dir, name=name, version="", default_hp_metric=False)


def mlflow_logger(
    save_dir: str,
    experiment_name: str,
    tracking_uri: str | None = None,
    name: str | None = None,
    method: str | None = None,
    seed: int | None = None,
    pictures: Sequence[str] = (),
) -> MLFlowLogger:
    """Returns an MLflow logger."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError(
            "logger=mlflow needs a server; set logger.tracking_uri=http://HOST:PORT, or the "
            "environment variable MLFLOW_TRACKING_URI."
        )
    with _installed("mlflow"):
        logger = _MLFlow(
            experiment_name=experiment_name,
            run_name=name or run_name(experiment_name, method, seed),
            tracking_uri=uri,
            tags=dict(zip(("method", "seed"), _words(method, seed), strict=False)),
            run_id=_known(save_dir, "mlflow"),
        )
        setattr(logger, _PICTURES_KEY, tuple(pictures))
        return logger


class _MLFlow(MLFlowLogger):
    """Names the parts of a metric with points: ``test/iou`` is no folder for ``test/iou/whole``."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs metrics, such as ``test/iou.whole``."""
        split = ((name.partition("/"), value) for name, value in metrics.items())
        super().log_metrics({a + b + c.replace("/", "."): v for (a, b, c), v in split}, step)


def no_logger() -> bool:
    """Returns the value with which Lightning logs nothing (its default may be TensorBoard).

    Example:
        >>> no_logger()
        False
    """
    return False


def run_name(group: str | None, method: str | None, seed: int | None) -> str:
    """Names a run by its experiment, method and seed.

    Example:
        >>> run_name("brats", "medfed.personalize.pfednet.PFedNet", 3)
        'brats pfednet seed 3'
    """
    return " ".join([*([group] if group else []), *_words(method, seed)])


def remember(logger: Logger | None, folder: Path) -> None:
    """Keeps the run's name in W&B or MLflow in the run folder, for when it is resumed."""
    if isinstance(logger, WandbLogger):
        write_json(RunFolder(folder).logger_json, {"wandb": logger.version})
    elif isinstance(logger, MLFlowLogger):
        write_json(RunFolder(folder).logger_json, {"mlflow": logger.run_id})


@contextmanager
def marked_as_failed(logger: Logger | bool | None) -> Iterator[None]:
    """Ends the run in W&B or MLflow as a failed one, if the body fails."""
    try:
        yield
    except BaseException:
        if isinstance(logger, _Wandb):
            logger.end(failed=True)
        elif isinstance(logger, MLFlowLogger):
            logger.finalize("failed")
        raise


def end_logging(
    logger: Logger | bool | None, pictures: Mapping[str, Path], summary: Mapping[str, Any]
) -> None:
    """Sends the test metrics and the pictures, and ends the run in W&B."""
    if not isinstance(logger, Logger):
        return
    over = summary["federation"]
    if not isinstance(logger, TensorBoardLogger):  # whose files stay in the run folder
        wanted = getattr(logger, _PICTURES_KEY, ())
        pictures = {n: p for n, p in pictures.items() if n not in OF_PATIENTS or n in wanted}
    tested = {f"test/{n}": v["mean"] for n, v in over.items()}
    tested |= {f"test/{n}_worst": v["worst"] for n, v in over.items()}
    if isinstance(logger, WandbLogger):
        each = summary["clients"].items()
        tested |= {f"test/{client}/{n}": values[n] for client, values in each for n in over}
        for name, path in pictures.items():
            logger.log_image(key=name, images=[str(path)])
        if each:
            logger.log_metrics({"test": _table(summary["clients"], list(over))})
        logger.experiment.summary.update(tested | {"selected_round": summary["selected_round"]})
        if isinstance(logger, _Wandb):
            logger.end(failed=False)
        else:
            logger.experiment.finish()
        return
    logger.log_metrics(tested, step=summary["rounds"] - 1)
    if isinstance(logger, TensorBoardLogger):
        import numpy as np
        from PIL import Image

        for name, path in pictures.items():
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            logger.experiment.add_image(name, pixels, dataformats="HWC")
    elif isinstance(logger, MLFlowLogger):
        for path in pictures.values():
            logger.experiment.log_artifact(logger.run_id, str(path), "pictures")
        rows = [[client, *map(values.get, over)] for client, values in summary["clients"].items()]
        table = {"columns": ["client", *over], "data": rows}
        logger.experiment.log_dict(logger.run_id, table, "test.json")
    logger.save()


def _table(clients: Mapping[str, Mapping[str, float]], metrics: Sequence[str]) -> Any:
    """Returns a W&B table of the test metrics with a row per client."""
    import wandb

    class Table(wandb.Table):
        # Others are sent as artifacts, too, for which W&B keeps a copy in the user's home.
        _log_type = "table-in-the-run-folder"

    rows = [[client, *map(values.get, metrics)] for client, values in clients.items()]
    return Table(columns=["client", *metrics], data=rows, allow_mixed_types=True)


def _words(method: str | None, seed: int | None) -> list[str]:
    words = [] if method is None else [method.rpartition(".")[2].lower()]
    return words if seed is None else [*words, f"seed {seed}"]


def _known(save_dir: str, service: str) -> str | None:
    path = RunFolder(Path(save_dir)).logger_json
    name = read_json(path, dict[str, Any]).get(service) if path.is_file() else None
    return None if name is None else str(name)


@contextmanager
def _installed(extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"logger={extra} needs a package that is not installed ({first_line(error)}); in a "
            f"clone of medfed run pip install '.[{extra}]', or choose logger=csv."
        ) from error
