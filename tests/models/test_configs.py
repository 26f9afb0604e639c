"""Every configuration of a model, an optimizer and a schedule is built and trains one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from medfed.models.task import TaskModule
from tests.sweeps import sweep

CONFIGS = Path(__file__).parents[2] / "configs"


def names(group: str) -> list[str]:
    found = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    return [name for name in found if name != "own"]  # which names nothing by itself


def compose(model: str, optimizer: str = "sgd", scheduler: str = "constant") -> DictConfig:
    """The root keys that a training configuration supplies."""
    tabular = model in ("linear", "logistic", "mlp", "mlp_regression", "poisson", "survival")
    root = {
        "in_channels": 7 if tabular else 2,
        "out_channels": 1 if model in ("linear", "mlp_regression", "poisson") else 2,
        "spatial_dims": 2,
        "regions": ["12.5", "60"] if model == "survival" else ["whole", "core"],
        "exclusive": False,
        "millimetres": True,
        "patch_size": [32, 32],
        "outcome_scale": [450.0, 60.0],
        "rounds": 5,
        "plan": {
            "strides": [[1, 1], [2, 2], [2, 2], [2, 1]],
            "kernel_sizes": [[3, 3]] * 4,
            "features": [4, 8, 16, 16],
        },
    }
    groups = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for group, name in groups.items():
        root[group] = OmegaConf.load(CONFIGS / group / f"{name}.yaml")
    return OmegaConf.create(root)


def build(cfg: DictConfig) -> TaskModule:
    task = instantiate(cfg.model)
    assert isinstance(task, TaskModule)
    return task


def step(task: TaskModule, cfg: DictConfig) -> None:
    image = torch.randn(2, 7) if cfg.in_channels == 7 else torch.randn(2, 2, 32, 32)
    label = torch.tensor([0, 1]) if cfg.out_channels == 2 else torch.tensor([0.3, 1.2])
    if hasattr(task, "regions"):
        label = (torch.rand(2, 2, 32, 32) > 0.5).float()
    batch = {"image": image, "label": label}
    if hasattr(task.network, "regression_head"):
        box = torch.tensor([3.0, 3, 3, 8, 8, 8, 1]).expand(2, 1, 7)
        batch = {"image": torch.randn(2, 2, 16, 16, 16), "label": box}
    if hasattr(task, "findings"):
        batch |= {"label": torch.eye(2), "class_weights": torch.ones(2, 2)}
    if hasattr(task, "cuts"):
        batch |= {"label": torch.tensor([[20.0, 1.0], [30.0, 0.0]])}
    optimizer = task.optimizer(task.parameters())
    schedule = task.scheduler(optimizer)
    before = [p.detach().clone() for p in task.parameters()]
    task.loss(batch).backward()
    optimizer.step()
    schedule.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, task.parameters(), strict=True))


@sweep("model", names("model"))
def test_model(model):
    cfg = compose(model)
    task = build(cfg)
    step(task, cfg)
    assert not [name for name, value in vars(task).items() if isinstance(value, ListConfig)]
    lists = (*task.personal, *task.selection, *getattr(task, "regions", ()))
    assert all(type(value) is str for value in lists)
    assert task.personal


@sweep("optimizer", names("optimizer"))
@sweep("scheduler", names("scheduler"))
def test_optimizer_and_scheduler(optimizer, scheduler):
    cfg = compose("logistic", optimizer, scheduler)
    step(build(cfg), cfg)


def rates(scheduler: str) -> list[float]:
    cfg = compose("logistic", "sgd", scheduler)
    task = build(cfg)
    optimizer = task.optimizer(task.parameters())
    schedule = task.scheduler(optimizer)
    found = []
    for _ in range(5):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_constant_is_constant():
    assert rates("constant") == [0.01] * 5


def test_cosine_falls_over_the_run():
    found = rates("cosine")
    assert found[0] == 0.01
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < 0.001


def test_poly_is_nnunets():
    assert rates("poly") == pytest.approx([0.01 * (1 - epoch / 5) ** 0.9 for epoch in range(5)])
