"""What the server of tests/processes.py has imported when it forks."""

import gc

import matplotlib.backends.backend_agg  # noqa: F401
import monai  # noqa: F401
import torch
import torch._dynamo
from numba.core.registry import cpu_target

import medfed.run.train  # noqa: F401
from tests import composing

composing.install()
cpu_target.target_context.refresh()
if not torch.accelerator.is_available():
    torch.manual_seed = torch.default_generator.manual_seed  # as in tests/conftest.py
# A fork has none of its parent's threads.
torch.set_num_threads(1)
gc.freeze()  # no fork searches through all that was imported
