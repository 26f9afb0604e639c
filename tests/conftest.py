"""Settings of all tests."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import composing

# Equal numbers of threads give equal bits; one is also the fastest for tests of this size.
torch.set_num_threads(1)


# The same examples everywhere and each time, however busy the machine: what fails is a failure of
# the change under test.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")

composing.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plugins",
        action="append",
        dest="plugin_folders",
        default=[],
        metavar="FOLDER",
        help="also test the methods and codecs of a folder outside the repository (repeatable)",
    )
    parser.addoption(
        "--every-method",
        action="store_true",
        help="test each method with what is tested once for each shape of state else",
    )


def pytest_configure(config: pytest.Config) -> None:
    if folders := [Path(f).resolve() for f in config.getoption("plugin_folders")]:
        from tests.contract.names import PLUGINS

        for folder in folders:
            if not folder.is_dir():
                raise pytest.UsageError(f"--plugins {folder} is no folder.")
        os.environ[PLUGINS] = os.pathsep.join(map(str, folders))
    if config.getoption("every_method"):
        from tests.contract.names import EVERY_METHOD

        os.environ[EVERY_METHOD] = "1"
