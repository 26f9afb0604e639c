"""All that a method is written with: ``from medfed.method import *``.

Each name keeps its documentation where it is defined. A method of yours may import the few names
that it needs from here. ``Literal`` stays in each method, as linters look for it there.
"""

# ruff: noqa: I001, RUF022 - in groups, by what they are for
from __future__ import annotations

# fmt: off
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from medfed.federation.algorithm import Algorithm, ClientInfo, Outbox, Replies, ServerRound, Start
from medfed.federation.algorithm import Weighting, client_sizes, sent_by_each
from medfed.federation.budget import batches_of, share_of
from medfed.federation.card import Card, Range, gradients_only
from medfed.federation.client import AfterStep, Batch, BatchPenalty, Client, ClientData, Features
from medfed.federation.client import Forward, GradientAt, Penalty, TrainOptions, put_back
from medfed.federation.client import statistics_at, with_statistics
from medfed.federation.lightning.collect import warn
from medfed.federation.onboarding import Exchange, OnboardingRules, TrainsOn
from medfed.federation.split import BufferPolicy, Needs, Normalization, ParameterSplit, Update
from medfed.federation.wire.packet import Message
from medfed.functional.prox import Proximity
from medfed.standalone.checks import check_count, check_fields, check_not_negative
from medfed.standalone.checks import check_optional_count, check_positive, within
from medfed.standalone.errors import ConfigError, NonFiniteError, did_you_mean
from medfed.common.floors import Statistic
from medfed.common.seeding import coin, derive_seed, numpy_rng, torch_rng
from medfed.common.tensors import State, Tensors, add, cut, flatten, gradient_of, layout_of, numel
from medfed.common.tensors import overwrite, select, subtract, weighted_mean, weighted_sum

__all__ = [
    # of Python and PyTorch
    "Annotated", "Any", "Callable", "ClassVar", "Iterable", "Iterator", "Mapping", "Self",
    "Sequence", "Tensor", "dataclass", "field", "nn", "replace", "torch",
    # what a method is, and what it declares
    "Algorithm", "Card", "OnboardingRules", "Range", "Statistic", "TrainsOn", "Weighting",
    "gradients_only",
    # the server's half: rounds, messages, the joining of a client
    "Exchange", "Message", "Outbox", "Replies", "ServerRound", "Start", "client_sizes",
    "sent_by_each",
    # the client's half: training, and where a method may change a step
    "AfterStep", "Batch", "BatchPenalty", "BufferPolicy", "Client", "ClientData", "ClientInfo",
    "Features", "Forward", "GradientAt", "Needs", "Normalization", "ParameterSplit", "Penalty",
    "Proximity", "TrainOptions", "Update",
    "batches_of", "put_back", "share_of", "statistics_at", "with_statistics",
    # algebra of named tensors
    "State", "Tensors", "add", "cut", "flatten", "gradient_of", "layout_of", "numel", "overwrite",
    "select", "subtract", "weighted_mean", "weighted_sum",
    # randomness that follows from the seed
    "coin", "derive_seed", "numpy_rng", "torch_rng",
    # ranges of hyper-parameters, errors and warnings
    "ConfigError", "NonFiniteError", "check_count", "check_fields", "check_not_negative",
    "check_optional_count", "check_positive", "did_you_mean", "warn", "within",
]
# fmt: on
