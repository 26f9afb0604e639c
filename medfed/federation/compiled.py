"""Losses compiled by ``torch.compile``, for batches of full size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medfed.common.errors import ConfigError, first_line
from medfed.federation.client import Batch


def compiled(loss: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Returns a loss that is compiled when it is first called, once per structure of its batches.

    Shapes are fixed, so that which code computes a batch depends on the batch alone and not on
    those before it: a resumed run equals itself. Random numbers are those of uncompiled code.

    Args:
        loss: Gives the scalar loss of a batch.

    Raises:
        ConfigError: If there is no C++ compiler; and later, if PyTorch cannot compile the loss.
    """
    from torch._dynamo.exc import TorchDynamoException  # slow to import
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "local.compile=true needs a C++ compiler on this machine; install g++ (Debian: "
            "apt-get install g++) or choose local.compile=false."
        ) from error
    quick = torch.compile(loss, dynamic=False, options={"fallback_random": True})

    def tried(batch: Batch) -> Tensor:
        try:
            return quick(batch)
        except TorchDynamoException as error:
            raise ConfigError(
                f"PyTorch cannot compile the loss of this model ({first_line(error)}); choose "
                "local.compile=false."
            ) from error

    return tried
