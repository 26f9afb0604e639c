"""Which settings of a Lightning Trainer have no meaning for rounds; docs/api/trainer.md has all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning import callbacks as of_lightning
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn

from medfed.federation.lightning.strategy import ClientSharding
from medfed.standalone.errors import ConfigError

TYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", *TYPES)
# They change the weights of the one network, which holds those of the last client.
_OF_ONE_MODEL = (
    *(of_lightning.StochasticWeightAveraging, of_lightning.WeightAveraging),
    *(of_lightning.ModelPruning, of_lightning.BaseFinetuning, of_lightning.BatchSizeFinder),
    *(of_lightning.GradientAccumulationScheduler, of_lightning.LearningRateFinder),
)


_STEPS = "would not make clients train less; set budget=LocalBudget(steps=N) of assemble"
# Settings of batches and steps, the values that change nothing, and what to do instead.
_OF_BATCHES = {
    "fast_dev_run": (
        ("False", "0"),
        "tries one batch, and here a batch is a round; set max_epochs=1 and LocalBudget(steps=1)",
    ),
    "overfit_batches": (("0", "0.0"), _STEPS),
    "limit_train_batches": (("1.0",), _STEPS),
    "accumulate_grad_batches": (
        ("1",),
        "does not reach clients; set budget=LocalBudget(accumulate=N) of assemble",
    ),
    "gradient_clip_val": (
        ("None", "0", "0.0"),
        "does not reach clients; set budget=LocalBudget(clip=NORM) of assemble",
    ),
}


def check_trainer(trainer: Any, network: nn.Module) -> None:
    """Refuses a Trainer whose settings would cut rounds short, or mean something else."""
    for reason in _reasons(trainer, network):
        raise ConfigError(f"{reason}.")


def _reasons(trainer: Any, network: nn.Module) -> Iterator[str]:
    strategy, precision = trainer.strategy, str(trainer.precision)
    if not isinstance(strategy, SingleDeviceStrategy | ClientSharding):
        yield (
            f"{type(strategy).__name__} would mix the gradients of clients; give the Trainer "
            "strategy=ClientSharding() of medfed.federation.lightning.strategy for several devices"
        )
    if precision not in PRECISIONS:
        yield f"Trainer(precision={precision!r}) is not possible; choose {', '.join(PRECISIONS)}"
    others = {p.dtype for p in network.parameters()} - {TYPES.get(precision)}
    if precision in TYPES and others:
        yield (
            f"Trainer(precision={precision!r}) would change the network's type and not that of the "
            f"clients' states, {str(others.pop())[6:]}; give assemble a network and data of that "
            "type, or choose 32-true, bf16-mixed or 16-mixed"
        )
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    sources = (loop._data_source for loop in (*loops, trainer.validate_loop, trainer.test_loop))
    if any(source.instance not in (None, trainer.lightning_module) for source in sources):
        yield (
            "The Trainer gets a DataLoader, and every client brings its own data; call fit, "
            "validate and test with the module alone"
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for name, (usual, reason) in _OF_BATCHES.items():
        if repr(value := getattr(trainer, name)) not in usual:
            yield f"Trainer({name}={value}) {reason}"
    if trainer.val_check_interval != 1 and trainer.check_val_every_n_epoch is not None:
        yield (
            f"Trainer(val_check_interval={trainer.val_check_interval}) counts batches, and here an "
            "epoch has one, the round; set check_val_every_n_epoch=N"
        )
    if isinstance(strategy, ClientSharding) and strategy._layer_sync is not None:
        yield (
            "Trainer(sync_batchnorm=True) would mix the statistics of clients; leave it out, and "
            "choose buffers of assemble"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, _OF_ONE_MODEL):
            yield (
                f"The callback {type(callback).__name__} changes one model or its optimizer, and "
                "here every client has its own; leave it out"
            )
