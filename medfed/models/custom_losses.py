"""A user's losses: how they are called, and whether they fit a task's outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medfed.common.streams import seeded
from medfed.standalone.errors import ConfigError, first_line

# From predictions and labels to a mean (a scalar), or to a value or several per sample.
CustomLoss = Callable[[Tensor, Tensor], Tensor]


class Tried(NamedTuple):
    """Predictions on which a loss or metric is tried before training."""

    right: Tensor  # correct predictions; confident logits if there is an ``activation``
    wrong: tuple[Tensor, ...]  # worse predictions
    target: Tensor  # the labels
    what: str  # a description of predictions and labels
    activation: str = "identity"  # turns predictions into probabilities; ``identity`` for none


def value_of(
    loss: CustomLoss, prediction: Tensor, target: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Returns a user's loss as a scalar.

    `prediction` is ``(B, ...)``; half precision is converted to single. `target` is ``(B, ...)``.
    `weights` is ``(B,)``, the samples' weights in the mean of their losses.

    Example:
        >>> each = nn.CrossEntropyLoss(reduction="none")
        >>> logits, label = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 0])
        >>> weight = torch.tensor([1.0, 3.0])
        >>> ours = value_of(each, logits, label, weight[label])
        >>> bool(torch.isclose(ours, nn.CrossEntropyLoss(weight)(logits, label)))
        True
    """
    if prediction.dtype in (torch.float16, torch.bfloat16):
        prediction = prediction.float()
    value = loss(prediction, target)
    if weights is None:
        return value.mean()
    return (value.reshape(len(weights), -1).mean(1) * weights).sum() / weights.sum()


def name_of(part: object) -> str:
    """Returns the name of a loss or metric for errors.

    Example:
        >>> name_of(nn.MSELoss()), name_of(partial(torch.sum))
        ('MSELoss', 'sum')
    """
    thing = part.func if isinstance(part, partial) else part
    return str(getattr(thing, "__name__", type(thing).__name__))


def check_loss(loss: object, tried: Tried, *, weighted: bool = False) -> None:
    """Tries a loss on predictions of known quality, before training.

    Example:
        >>> labels = torch.tensor([0, 1])
        >>> right = 8.0 * nn.functional.one_hot(labels) - 4
        >>> tried = Tried(right, (-right,), labels, "logits (B, K) and class indices (B,)")
        >>> check_loss(nn.CrossEntropyLoss(), tried)
        >>> check_loss(nn.BCEWithLogitsLoss(), tried)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: model.loss=BCEWithLogitsLoss cannot take what this \
task gives, logits (B, K) and class indices (B,): Target size (torch.Size([2])) must be the same \
as input size (torch.Size([2, 2])).
    """
    if not callable(loss):
        raise ConfigError(
            f"model.loss={loss} is not a loss; name one by "
            "model.loss={_target_: ...}, or leave the default."
        )
    name = f"model.loss={name_of(loss)}"
    if isinstance(loss, nn.Module):
        _check_module(loss, name, tried)
    called = partial(_called, loss, name, tried)
    with seeded():
        value = called(tried.right.clone().requires_grad_())
        right, *wrong = (called(p).mean() for p in (tried.right, *tried.wrong))
        twice = called(*(torch.cat([t, t]) for t in (tried.wrong[0], tried.target)))
    if weighted and not (value.ndim and len(value) == len(tried.target)):
        raise ConfigError(
            f"model.class_weights weighs samples, but {name} gives one number for all; add "
            "reduction: none to it, or give it the weights itself."
        )
    if not value.requires_grad:
        raise ConfigError(f"{name} gives no gradient of the predictions, so nothing trains.")
    if not torch.isclose(twice.mean(), wrong[0], rtol=1e-3, atol=1e-6):
        raise ConfigError(f"{name} grows with the number of samples; add reduction: mean.")
    if worse := [w for w in wrong if not bool(right < w)]:
        raise ConfigError(
            f"{name} is {right:.4g} where predictions are right and {worse[0]:.4g} where they are "
            f"worse, so it does not take what this task gives: {tried.what}."
        )
    if tried.activation in ("sigmoid", "softmax"):
        _check_logits(called, name, tried)


def _check_logits(called: Callable[[Tensor], Tensor], name: str, tried: Tried) -> None:
    """Checks that the loss reads logits: 0 is undecided, and regions are independent."""
    right = tried.right
    halves = (right.clamp(min=0), right.clamp(max=0))  # undecided on what is not, on what is there
    points = (right, 2 * right, 4 * right, right + 3, right / 8, *halves, *(h / 8 for h in halves))
    with seeded():
        one, two, four, moved, mild, *others = (called(p).mean() for p in points)
    # Smoothed labels make the certain no better, distances the hardly certain; no loss both.
    pairs = zip(others[:2], others[2:], strict=True)
    odd = [not (one < sure or mild < hardly) for sure, hardly in pairs]
    endless = (two - four) > 1.8 * (one - two) > 1e-3
    if endless or any(odd):
        raise ConfigError(
            f"{name} does not take logits, of which those above 0 are for a class and those below "
            f"against it; this task gives {tried.what}."
        )
    several = tried.activation == "sigmoid" and tried.target.shape[1] > 1
    if several and torch.isclose(one, moved, rtol=1e-6):
        raise ConfigError(f"{name} is of exclusive classes, but regions of these data may overlap.")


def _called(
    loss: CustomLoss, name: str, tried: Tried, prediction: Tensor, target: Tensor | None = None
) -> Tensor:
    """The loss's result, checked."""
    target = tried.target if target is None else target
    try:
        value = loss(prediction, target)
    except Exception as error:  # all errors of the user's code
        raise ConfigError(
            f"{name} cannot take what this task gives, {tried.what}: {first_line(error)}."
        ) from error
    if not isinstance(value, Tensor) or (value.ndim and len(value) != len(target)):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"{name} gives {shape} for {len(target)} samples: no mean or value each.")
    if not bool(value.isfinite().all()):
        raise ConfigError(f"{name} is not finite for {tried.what}.")
    return value


def _check_module(loss: nn.Module, name: str, tried: Tried) -> None:
    activation = tried.activation
    if any(p.requires_grad for p in loss.parameters()):
        raise ConfigError(f"{name} has parameters, which no client would train.")
    if activation not in ("sigmoid", "softmax"):
        return
    for part in loss.modules():
        if activation == "sigmoid" and tried.target.shape[1] > 1 and hasattr(part, "cross_entropy"):
            raise ConfigError(
                f"{name} has a cross-entropy of exclusive classes, but regions of these data may "
                "overlap; leave model.loss at null, or take DiceFocalLoss."
            )
        switches = {s: getattr(part, s, None) for s in ("sigmoid", "softmax")}
        if None in switches.values() or getattr(part, "other_act", None) is not None:
            continue
        if switches != {s: s == activation for s in switches}:
            raise ConfigError(
                f"{name} is given logits, of which this task makes probabilities by {activation}; "
                f"add {activation}: true to it{', and no other' * any(switches.values())}."
            )
