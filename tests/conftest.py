"""Settings of all tests."""

import torch

# Equal numbers of threads give equal bits; one is also the fastest for tests of this size.
torch.set_num_threads(1)
