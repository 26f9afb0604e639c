"""What decides a verdict, what a task cannot tell, and what its sentences say."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.evidence.verdict_rule import rates
from medfed.functional.statistics import LEVEL, difference, noncentrality, splits_needed
from medfed.reports.findings import judged
from medfed.reports.sentences import about
from medfed.reports.tasks import Moment, Scores, Task
from medfed.reports.verdicts import harm_of, verdict
from tests.pages import DOCS

SPLITS, CLIENTS = 6, 2


def task(noise: float, metric: str = "auroc", **gains: float) -> Task:
    """Methods that gain so much over 0.9, with a spread over splits."""
    found = Task("simulated", "", metric, clients=("a", "b"), patients=100)
    rng = np.random.default_rng(0)
    for name, gain in {"local": 0.0, **gains}.items():
        spread = noise if name == "ditto" else 0
        values = 0.9 + gain + spread * rng.normal(size=(SPLITS, 1)) * np.ones(CLIENTS)
        none = np.zeros((SPLITS, 0, CLIENTS))
        found.scores[name] = Scores(name, values, none, (0.0, 0.0), 1.0, 0, {})
    return found


def many_methods() -> Task:
    """Twelve methods at twenty hospitals; each sends a little more and is a little better."""
    found = Task("simulated", "", "auroc", clients=(*(f"hospital_{n:03}" for n in range(20)),))
    rng = np.random.default_rng(0)
    names = (
        "local",
        "fedavg",
        "pooled",
        "ditto",
        "pfednet",
        "fedrep",
        "finetune",
        "fedper",
        "apfl",
    )
    for k, name in enumerate((*names, "fedprox", "fedbabu", "clusteredfl")):
        values = 0.7 + 0.01 * k + 0.02 * rng.normal(size=(SPLITS, 20))
        course = tuple(Moment(r, 0.5 + 0.05 * r + 0.01 * k, 4e6 * r, 9.0 * r) for r in range(1, 6))
        sent = (2.3e7 * (1 + 0.01 * k) * (k > 0), 0.0)
        none = np.zeros((SPLITS, 0, 20))
        found.scores[name] = Scores(name, values, none, sent, 1.0, 0, {}, course)
    return found


def test_the_rule_detects_and_errs_as_often_as_it_says():
    """A true difference of the detectable size in 80 %, none in 95 %; six methods, five splits."""
    found = rates(splits=5, overlap=0.25, methods=6, repeats=300)
    assert found.detected == pytest.approx(0.8, abs=0.07)
    assert found.wrong < 0.05 + 0.03
    assert found.twice < found.detected - 0.1  # what a second condition would lose


def test_as_many_splits_as_are_needed_make_a_difference_detectable():
    found = difference([0.1, -0.1, 0.2, 0.1], comparisons=5)
    needed = splits_needed(0.05, found, 4, comparisons=5)
    sizes = [
        found.error * math.sqrt(4 / n) * noncentrality(n - 1, (1 - LEVEL) / 5, 0.8)
        for n in (needed - 1, needed)
    ]
    assert sizes[0] > 0.05 >= sizes[1]


def test_more_splits_are_said_for_the_gain_seen_and_for_a_stated_one_by_its_own_spread():
    asked = task(0.02, ditto=0.004, apfl=-0.01)
    report = judged([asked])
    (told,) = report.answers.values()
    own = report.tasks[0][1]["ditto"].against["local"].difference
    counts = [splits_needed(gain, own, 6, asked.overlap, 2) for gain in (own.mean, 0.02)]
    assert told[0].startswith("No method is shown to be better than local training (0.9000).")
    assert f"largest gain over local training is that of ditto, {own.mean:+.4f}. To" in told[0]
    for what, gain, count in zip(
        ("one as large", "a gain of 0.02"), (own.mean, 0.02), counts, strict=True
    ):
        if own.detectable <= gain:
            assert f"{what} takes no more than there is" in told[0]
        elif count:
            assert f"{what} takes about {about(count)} splits instead of 6" in told[0]
        else:
            spread = own.error / math.sqrt(1 / 6 + asked.overlap)
            error = spread * math.sqrt(1 / 20 + asked.overlap)
            times = (error * noncentrality(19, (1 - LEVEL) / 2, 0.8) / gain) ** 2
            assert (
                f"{what} takes about {about(times)} times as many patients and 20 splits"
                in (told[0])
            )
            assert "more splits of the same patients will not do" in told[0]


def test_a_stated_gain_is_used_and_one_that_the_metric_excludes_is_not():
    (told,) = judged([task(0.001, ditto=-0.001)], target=0.05).answers.values()
    assert (
        "No method gains over local training here. To show a gain of 0.05 takes no more" in told[0]
    )
    (told,) = judged([task(0.3, ditto=-0.01)], target=0.2).answers.values()
    assert told[0].endswith("No method gains over local training here.")


def test_intervals_stay_within_what_is_possible():
    report = judged([task(0.3, ditto=0.05, pooled=0.05)])
    ((_, verdicts),) = report.tasks
    known = {n: v.mean for n, v in verdicts.items() if not math.isnan(v.mean.low)}
    assert [*known] == ["ditto"]  # the others have the same mean on every split: no interval
    assert all(0 <= mean.low <= mean.high <= 1 for mean in known.values())
    gains = verdicts["ditto"].harm.gains.values()
    assert all(-1 <= g.difference.low <= g.difference.high <= 1 for g in gains)


@pytest.mark.parametrize("splits", [2, 3, 4, 6])
@pytest.mark.parametrize("same", [True, False], ids=["same hospitals", "others"])
def test_an_interval_over_splits_takes_four(splits, same):
    """An interval of two splits is nearly all that is possible: a sentence says so instead."""
    few = task(0.05, ditto=0.05)
    few.same = same
    few.scores = {
        name: replace(one, values=one.values[:splits], resampled=one.resampled[:splits])
        for name, one in few.scores.items()
    }
    report = judged([few])
    ((_, verdicts),), (said,) = report.tasks, report.answers.values()
    ditto = verdicts["ditto"]
    shown = [ditto.mean, ditto.against["local"].difference]
    shown += [] if same else [ditto.harm]  # the share of hospitals by p-values needs no interval
    assert {math.isfinite(one.high - one.low) for one in shown} == {splits >= 4}
    assert not math.isnan(ditto.against["local"].p)
    assert ("too few for intervals" in " ".join(said)) == (splits < 4)


def test_a_number_of_patients_that_nobody_can_collect_is_not_said():
    chance = judged([task(0.9, ditto=0)]).tasks[0][1]["ditto"].against["local"].difference.mean
    (found,) = judged([task(0.9, ditto=0.001 - chance)], target=0.02).answers.values()
    assert "To show one as large or a gain of 0.02 takes more than 100 times" in found[0]
    assert found[0].count("more than 100 times as many patients") == 1
    assert ":" not in found[0].partition("To show ")[2]
    assert not re.search(r"about [\d,]{4,} times", found[0])


@pytest.mark.parametrize("gain", [0.0, 0.01])
def test_nothing_is_promised_where_no_spread_is_known(gain):
    """Scores that differ equally, or not at all, on every split tell nothing of chance."""
    (found,) = judged([task(0, ditto=-gain)], target=0.02).answers.values()
    assert "No method gains over local training here." in found[0]
    assert "To show" not in found[0]


def test_no_number_stands_beside_no_answer_is_sure():
    few = task(0.05, ditto=0.02)
    few.fewest = {"a": (3, "test patients")}
    (found,) = judged([few]).answers.values()
    assert "no answer is sure" in " ".join(found)
    assert "To show" not in " ".join(found)


@pytest.mark.parametrize("gain", [-0.05, 0.05])
def test_nothing_is_better_or_worse_beside_no_answer_is_sure(gain):
    sure = task(0.001, ditto=gain)
    ((_, verdicts),) = judged([sure]).tasks
    assert verdicts["ditto"].against["local"].verdict == ("better" if gain > 0 else "worse")
    sure.fewest = {"a": (3, "test patients")}
    report = judged([sure])
    ((_, verdicts),), (found,) = report.tasks, report.answers.values()
    assert {g.verdict for v in verdicts.values() for g in v.against.values()} == {"undecided"}
    assert not verdicts["ditto"].is_worse
    assert "No method is shown to be better than local training" in found[0]


def harm_with(gains: np.ndarray, fewest: int = 20):
    """Whom a method harms whose gains over splits (S, C) are these."""
    one = Task("toy", "", "auroc", clients=tuple("abcdef"[: gains.shape[1]]))
    one.fewest = dict.fromkeys(one.clients, (fewest, "test patients"))
    none = np.zeros((len(gains), 0, gains.shape[1]))
    of = [Scores("x", values, none, (0.0, 0.0), 1.0) for values in (gains, 0 * gains)]
    return harm_of(*of, one)


def test_the_interval_of_the_share_of_harmed_clients_has_the_true_one():
    """Of six clients, two of whom are worse off; three of them so little that few see it."""
    rng, true = np.random.default_rng(5), np.array([-0.2, -0.01, 0.005, 0.01, 0.1, 0.3])
    inside, ends = 0, set()
    for _ in range(400):
        values = rng.normal(true, 0.05, (5, 6))
        harm = harm_with(values)
        assert harm.low <= harm.share <= harm.high
        assert harm.share == (values.mean(0) < 0).mean()
        inside += harm.low <= 2 / 6 <= harm.high
        ends.add((round(harm.low * 6), round(harm.high * 6)))
    assert inside >= 0.95 * 400
    assert {(1, 4), (1, 5)} <= ends  # and it says something


def test_clients_of_whom_nothing_is_known_count_for_nothing():
    unknown = [math.nan] * 4
    nothing = harm_with(np.array([unknown]).T)
    assert all(map(math.isnan, (nothing.share, nothing.low, nothing.high)))
    one = harm_with(np.array([[-0.1, math.nan]]))  # of one split nothing is known but the mean
    assert one.share == 1
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    some = harm_with(np.array([[-0.1, -0.11, -0.12, -0.11], unknown, [0.0] * 4]).T)
    assert (some.share, some.low, some.high) == (0.5, 0.5, 1)
    assert some.surely == ("a",)
    few = harm_with(np.array([[-0.1, -0.11, -0.12], [0.1, -0.1, 0.2]]).T)
    assert (few.surely, few.share) == (("a",), 0.5)
    assert math.isnan(few.low), "fewer than four splits have no interval"


@pytest.mark.parametrize("fewest", [3, 20], ids=["all small", "all large"])
def test_the_interval_of_a_share_goes_by_the_verdicts_of_the_hospitals(fewest):
    """Where nothing is called better or worse, no interval says that some hospital is."""
    rng = np.random.default_rng(1)
    harm = harm_with(rng.normal([-0.2, -0.1, 0.0, 0.2], 0.01, (5, 4)), fewest)
    words = [gain.verdict for gain in harm.gains.values()]
    assert (harm.low, harm.high) == (words.count("worse") / 4, 1 - words.count("better") / 4)
    assert (harm.low, harm.high) == ((0, 1) if fewest < 10 else (0.5, 0.75))
    assert harm.surely == (() if fewest < 10 else ("a", "b"))


@pytest.mark.parametrize(
    ("small", "unknown", "of"),
    [
        (0, 0, "of the hospitals"),
        (3, 0, "of the 17 hospitals that decide"),
        (0, 2, "of the 18 hospitals with a value"),
        (3, 2, "of the 15 hospitals that decide"),
    ],
    ids=str,
)
def test_a_share_says_of_which_hospitals_it_is(small, unknown, of):
    one = many_methods()
    for scores in one.scores.values():
        scores.values[:, 20 - unknown :] = math.nan
    one.leave_out({f"hospital_{n:03}": "3 test patients" for n in range(small)})
    (found,) = judged([one]).answers.values()
    (harm,) = [line for line in found if "With FedAvg" in line]
    assert f"{of} have a lower auroc than alone" in harm
    words = "Worst, decile and share harmed are of the others."
    assert (words in " ".join(found)) == bool(small)


def test_few_splits_do_not_multiply_the_patients():
    """Of two splits the uncertain spread alone would ask for hundreds of times as many."""
    few = task(0.05, ditto=0)
    few.overlap = 0.25
    few.scores = {
        name: replace(one, values=one.values[:2], resampled=one.resampled[:2])
        for name, one in few.scores.items()
    }
    values = np.repeat([[0.9], [0.9508]], CLIENTS, axis=1)
    few.scores["ditto"] = replace(few.scores["ditto"], values=values)
    report = judged([few])
    gap = report.tasks[0][1]["ditto"].against["local"].difference
    assert gap.mean == pytest.approx(0.0254)
    assert (gap.detectable / gap.mean) ** 2 > 100
    (found, _) = next(iter(report.answers.values()))
    (times,) = re.findall(r"one as large takes about (\d+) times as many patients", found)
    error = np.std([0, 0.0508], ddof=1) * math.sqrt(1 / 20 + 0.25)
    assert int(times) == math.ceil((error * noncentrality(19, 1 - LEVEL, 0.8) / 0.0254) ** 2)


def test_the_stored_findings_agree_with_the_rule():
    findings = json.loads((DOCS / "benchmark" / "findings.json").read_text())
    for task in findings["tasks"].values():
        for method in task["methods"].values():
            for against in method["against"].values():
                p = math.nan if against["p_holm"] is None else against["p_holm"]
                assert against["verdict"] == verdict(against["mean"], p)
