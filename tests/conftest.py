"""Settings of all tests."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hypothesis import HealthCheck, settings

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

# Thousands of compositions read the same files, each of which Hydra would parse anew.
_parsed: dict[tuple[str, str, int, int], Any] = {}
_parse = FileConfigSource.load_config


def _parsed_once(self: FileConfigSource, config_path: str) -> Any:
    path = os.path.join(self.path, self._normalize_file_name(config_path))
    try:
        file = os.stat(path)
    except OSError:
        return _parse(self, config_path)
    key = (self.provider, path, file.st_mtime_ns, file.st_size)
    if key not in _parsed:
        _parsed[key] = _parse(self, config_path)
    return copy.deepcopy(_parsed[key])


FileConfigSource.load_config = _parsed_once


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
