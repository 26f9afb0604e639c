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


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    """A table of each hospital of a study, and one of all."""
    from tests.sites import studies  # late: it imports PyTorch

    return studies.written(tmp_path_factory.mktemp("study"))
