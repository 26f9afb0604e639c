"""What of this folder needs NVIDIA FLARE even to be looked at for doctests; callers are closed."""

from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("nvflare") else ["echo.py", "hand_in.py"]


@pytest.fixture(autouse=True)
def closed_callers():
    """Ends the threads of all callers of the toy federation, as a run's end does."""
    from tests.sites.toy_sites import OPEN  # late: it imports PyTorch

    yield
    while OPEN:
        OPEN.pop().__exit__()
