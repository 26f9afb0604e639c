"""Two ranks equal one, bit for bit.

With half cohorts, whose clients move between the ranks, it is once per shape of state; with all
clients, resumed, and with lossy codecs it is once per kind of training.
"""

from __future__ import annotations

import json

import pytest

from medfed.federation.reference import run_reference
from tests.contract.harness import federation, half, lightning, lossy
from tests.contract.ranks import outcome
from tests.contract.shapes import ENGINES, STATES
from tests.processes import ROOT, ranks

MOMENTS = "fedbn+averaged"


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory) -> list[dict]:
    """Trains the methods that this session tests, all in one process group."""
    here = [item for item in request.session.items if item.path == request.path]
    asked: dict[str, set[str]] = {"half": set(), "all": set(), "lossy": set()}
    for item in here:
        own = item.callspec.params
        asked[own.get("cohort", "lossy" if "label" in own else "all")].add(own["name"])
    out = tmp_path_factory.mktemp("ranks")
    script = ROOT / "tests" / "contract" / "ranks.py"
    words = [" ".join(sorted(names)) for names in asked.values()]
    started = ranks(script, str(out), "2", *words, together=True)
    logs = [p.communicate(timeout=280)[0] for p in started]
    assert [p.returncode for p in started] == [0, 0], "\n".join(logs)
    return [json.loads((out / f"rank{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize(
    ("name", "cohort"), [*((n, "half") for n in STATES), *((n, "all") for n in (*ENGINES, MOMENTS))]
)
def test_two_ranks_equal_one(name, cohort, two_ranks):
    module, evaluation = lightning(name, cohort=half() if cohort == "half" else None)
    expected = outcome(module)
    seen: dict[str, str] = {}
    for result in (r[f"{name}/{cohort}"] for r in two_ranks):
        assert result["ledger"] == expected["ledger"]
        assert result["spent"] == expected["spent"]
        assert result["digests"]["server"] == expected["digests"]["server"]
        assert result["history"] == json.loads(json.dumps(evaluation.history))
        assert result["losses"] == json.loads(json.dumps(evaluation.losses))
        seen |= result["digests"]
    assert seen == expected["digests"]


@pytest.mark.parametrize("name", [*ENGINES, MOMENTS])
def test_two_ranks_resumed_equal_straight(name, two_ranks):
    digests: dict[str, dict[str, str]] = {"all": {}, "resumed": {}}
    for result in two_ranks:
        straight, resumed = result[f"{name}/all"], result[f"{name}/resumed"]
        for key in ("ledger", "spent"):
            assert resumed[key] == straight[key]
        for label, seen in digests.items():  # clients move to whichever rank has less to do
            seen |= result[f"{name}/{label}"]["digests"]
    assert digests["resumed"] == digests["all"]


@pytest.mark.parametrize("label", ["lossy", "lossy resumed"])
@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks_with_lossy_codecs_equal_the_plain_loop(name, label, two_ranks):
    """Memory that lives on one rank only is in the checkpoint, too."""
    _, fed, _ = federation(name, channel=lossy("stc"), cohort=half(), rounds=2)
    expected, seen = run_reference(fed, 2), {}
    for result in (r[f"{name}/{label}"] for r in two_ranks):
        assert result["ledger"] == expected.ledger.to_csv()
        assert result["digests"]["server"] == expected.digests()["server"]
        seen |= result["digests"]
    assert seen == expected.digests()
