"""Settings of all tests."""

import gc
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import sweeps, tiers

SETTINGS = pytest.StashKey[dict[str, object]]()
RUNNING = pytest.StashKey[set[threading.Thread | int]]()
HANDLERS = pytest.StashKey[list[logging.Handler]]()
WORDS = pytest.StashKey[list[str]]()

# Before NumPy is imported, and for all processes: the workers of the tests take all cores already.
os.environ.setdefault("OMP_NUM_THREADS", "1")
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
    parser.addoption(
        "--tier",
        choices=["all", "short", "rest"],
        default="all",
        help="the cases that are short or stand for a promise, or all others: tests/tiers.py",
    )
    parser.addoption(
        "--seconds", type=Path, metavar="FILE", help="write which cases are short by their CPU time"
    )
    parser.addoption(
        "--changed", metavar="COMMIT", help="only what a change since a commit can break"
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
    if config.getoption("seconds") and getattr(config.option, "dist", "no") == "no":
        config.pluginmanager.register(tiers.Stopwatch(config.getoption("seconds")))


def pytest_unconfigure(config: pytest.Config) -> None:
    record = config.getoption("seconds")
    if record and not hasattr(config, "workerinput"):  # not in a worker: all of them are done
        tiers.write(record, record.parent.glob(f"{record.name}.*.lines"))


def pytest_sessionstart(session: pytest.Session) -> None:
    if getattr(session.config.option, "dist", "no") == "no":  # else the workers run the tests
        import torch

        from tests import composing

        # Equal numbers of threads give equal bits; one is also the fastest for tests of this size.
        torch.set_num_threads(1)
        composing.install()
        if not torch.accelerator.is_available():
            # Else each call formats the stack three times, for devices that are not there.
            torch.manual_seed = torch.default_generator.manual_seed


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    from tests import leftovers

    leftovers.seed()  # no test draws what another has left of the global streams
    item.stash[SETTINGS] = leftovers.settings()
    item.stash[HANDLERS] = logging.root.handlers[:]
    item.stash[WORDS] = sys.argv[:]
    yield
    item.stash[RUNNING] = leftovers.running()  # what a fixture of a module runs, ends with it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    from tests import leftovers

    sys.argv = item.stash[WORDS]  # those of a command, such as W&B reads
    for handler in logging.root.handlers[:]:  # of a command: it writes to the output of this test
        if handler not in item.stash[HANDLERS] and "_pytest" not in type(handler).__module__:
            logging.root.removeHandler(handler)
    if changed := leftovers.changed(item.stash[SETTINGS]):
        pytest.fail(f"This test leaves other settings: {', '.join(changed)}.", pytrace=False)
    if RUNNING in item.stash:
        item.funcargs.clear()  # they may hold a pool, which ends with them
        if left := leftovers.left(item.stash[RUNNING]):
            pytest.fail(f"This test leaves behind: {', '.join(left)}.", pytrace=False)


# The longest files come first: no worker waits for another that has begun one of them last.
LONGEST = ("test_contract.py", "test_wheel.py", "test_docs.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweeps.list_rows(metafunc, alone=bool(metafunc.config.option.keyword))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Another process would give the case another name, and workers would not agree on the cases.
    if named := next((item.nodeid for item in items if " at 0x" in item.nodeid), None):
        raise pytest.UsageError(f"{named} has an address in its name; give the case an id.")
    left_out: list[pytest.Item] = []
    if since := config.getoption("changed"):
        from tests import changed

        files = changed.tests_of(changed.changed_files(since))
        if files is not None:
            paths = {changed.ROOT / path for path in files}
            left_out += [item for item in items if item.path not in paths]
            items[:] = [item for item in items if item.path in paths]
    if (tier := config.getoption("tier")) != "all":
        items[:], others = tiers.of_tier(items, tier)
        left_out += others
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    gc.freeze()  # each search through all that was imported would take half a second


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs each experiment once, and returns a copy of the folder that it leaves."""
    from tests.integration.runs import run

    made: dict[tuple[str, ...], Path] = {}

    def copy_of(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "run"
        if overrides not in made:
            run(folder, *overrides)
            made[overrides] = Path(shutil.copytree(folder, folder.with_name("kept")))
        else:
            shutil.copytree(made[overrides], folder)
        return folder

    return copy_of
