"""The questions of ``docs/design.md``: its answers name the files that a run passes, in order."""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medfed.commands.main import main
from medfed.config.compose import load
from medfed.config.description import describe
from medfed.sites.agreement import Agreed
from medfed.sites.run import coordinate
from tests.integration.runs import CLINICAL, UNDRAWN, imaging
from tests.sites.hospitals import QUICK
from tests.sites.tables import EXPERIMENT, SITES
from tests.sites.test_site_folder import hospitals

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "medfed"
FIRST_GRADIENT = "federation/engine/gradients.py", "Gradients.add"
Function = tuple[str, str]  # its file within the package, and its qualified name


@contextmanager
def recorded(last: Function | None = None) -> Iterator[list[Function]]:
    """Lists the calls of the package's functions in its body, up to the first one of `last`."""
    calls: list[Function] = []
    inside = f"{PACKAGE}/"

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside):
            calls.append((code.co_filename.removeprefix(inside), code.co_qualname))
            if calls[-1] == last:
                sys.setprofile(None)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def brats(folder: Path) -> list[Function]:
    keys = [*imaging(folder / "data"), *UNDRAWN, "data.patches=fixed", "data.spacing=[2,2]"]
    with recorded(FIRST_GRADIENT) as calls:
        main(["train", *keys, f"hydra.run.dir={folder / 'run'}"])
    assert calls[-1] == FIRST_GRADIENT
    return calls


def bundle(folder: Path) -> list[Function]:
    main(["train", *CLINICAL, *UNDRAWN, f"hydra.run.dir={folder / 'run'}"])
    with recorded() as calls:
        main(["export", f"run={folder / 'run'}", "client=hospital_0"])
    return calls


def sites(folder: Path) -> list[Function]:
    agreed, alone, _ = Agreed.of([*EXPERIMENT, "logger=none", "rounds=1"], SITES)
    transport = hospitals(folder, agreed)
    config = load([*agreed.overrides, *alone, "data.path=null", f"folder={folder / 'server'}"])
    with recorded() as calls:
        coordinate(describe(config), transport, agreed.sites, QUICK)
    return calls


def report(folder: Path) -> list[Function]:
    with recorded() as calls:
        for method in ("local", "fedavg"):
            for seed in (0, 1):
                keys = f"algorithm={method}", f"seed={seed}", *UNDRAWN
                place = folder / "runs" / f"{method}_{seed}"
                main(["train", *CLINICAL, *keys, f"hydra.run.dir={place}"])
        main(["report", f"runs={folder / 'runs'}", "figures=false"])
    return calls


@pytest.mark.parametrize(
    ("made", "asked"),
    [
        (brats, ("what happens before the first step?", "how does a NIfTI file become a patch?")),
        (bundle, ("how is a bundle made?",)),
        (sites, ("what does a site check before it answers?",)),
        (report, ("where does a client's gain come from?",)),
    ],
    ids=["train", "export", "site", "report"],
)
def test_a_run_passes_the_functions_that_the_page_names(made, asked, tmp_path):
    house = runpy.run_path(str(ROOT / "benchmarks/project/house.py"))
    calls, answers = made(tmp_path), house["questions"](ROOT)
    for question in asked:
        waiting = iter(calls)
        for file, names in answers[question]:
            of_file = {name for at, name in calls if at == file}
            called = {n: [c for c in of_file if f".{n}." in f".{c}."] for n in names}
            absent = [n for n, known in called.items() if not known and not n.isupper()]
            assert not absent, f"{question} {file}: {absent} is not on the way"
            wanted = {(file, c) for known in called.values() for c in known}
            assert any(call in wanted for call in waiting), f"{question} {file} comes earlier"
