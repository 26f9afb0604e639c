"""Claims: what is asked of cells, the statistics against SciPy, and the words."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from benchmarks.evidence.judge_claims import judge_claims, read_claims, sentence
from medfed.benchmark.suite import ALWAYS, suites
from medfed.standalone.errors import ConfigError

RNG = np.random.default_rng(0)
CLIENTS = {"a": 0.1, "b": -0.1}
BASE = RNG.normal(0.7, 0.02, 10)  # AUROC of ten splits
MEASURED = {
    "plain": BASE,
    "better": BASE + 0.05 + RNG.normal(0, 0.005, 10),
    "alike": BASE + RNG.normal(0, 0.005, 10),
    "worse": BASE - 0.05 + RNG.normal(0, 0.005, 10),
}


def result(value, *, data="0", sent=100, index=1.0):
    return {
        "metric": ["auroc", "max"],
        "clients": {c: {"auroc": value + d, "brier": 1 - value} for c, d in CLIENTS.items()},
        "patients": {"a": {"train": 8, "val": 2, "test": 5}},
        "data": data,
        "bytes": {"up": sent, "down": 10 * sent},
        "memberships": {"adjusted_rand": index},
    }


def progress(measured=MEASURED, splits="sample", **own):
    """What a benchmark would have read of cells."""
    suite = SimpleNamespace(name="mine", base="one", splits=splits)
    found = []
    for name, values in measured.items():
        cells = [
            SimpleNamespace(variant="one", stage="final", place=f"{name}/{n}") for n in range(10)
        ]
        given = {k: v[name] for k, v in own.items() if name in v}
        results = {c.place: result(v, **given) for c, v in zip(cells, values, strict=True)}
        group = SimpleNamespace(
            suite=suite,
            method=SimpleNamespace(name=name),
            variants=("one",),
            size=SimpleNamespace(splits=10),
        )
        pairs = [(c, results[c.place]) for c in cells]
        found.append(SimpleNamespace(group=group, finals=lambda _, pairs=pairs: pairs))
    return found


def ask(tmp_path, parts, *given, reasons="[]", **own):
    text = f"claim: It is so.\nsource: A paper\nparts: [{parts}]\nreasons: {reasons}\n"
    (tmp_path / "zz_mine.yaml").write_text(text)
    found = judge_claims(progress(*given, **own), tmp_path)
    return next((one for one in found if one.name == "zz_mine"), None)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("better: better, than: plain", "yes"),
        ("better: worse, than: plain", "no"),
        ("better: alike, than: plain", "cannot tell"),
        ("better: better, than: plain, by: 0.1", "no"),
        ("better: better, than: plain, metric: brier", "yes"),  # smaller is better
        ("as_good: alike, as: plain, within: 0.02", "yes"),
        ("as_good: worse, as: plain, within: 0.02", "no"),
        ("as_good: worse, as: plain, within: 0.05", "cannot tell"),
        ("widens: [better, plain], over: [alike, plain]", "yes"),
        ("peak: [alike, better], above: [plain, worse]", "yes"),
        ("peak: [alike, worse], above: [plain, better]", "no"),
        ("peak: [better], above: [better, plain]", "cannot tell"),
    ],
)
def test_a_question_is_answered(asked, answer, tmp_path):
    found = ask(tmp_path, f"{{suite: mine, {asked}}}")
    assert found.parts[0].answer == answer
    assert found.parts[0].where == "mine/one"
    assert found.verdict == {"yes": "confirmed", "no": "refuted"}.get(answer, answer)


def test_the_numbers_are_those_of_a_t_test_of_the_splits(tmp_path):
    (one,) = ask(tmp_path, "{suite: mine, better: better, than: plain, by: 0.045}").parts
    gap = MEASURED["better"] - MEASURED["plain"]
    plain = ttest_1samp(gap, 0.045)
    low, high = plain.confidence_interval(0.95)
    assert (one.mean, one.p) == (pytest.approx(gap.mean()), pytest.approx(plain.pvalue))
    assert (one.low, one.high) == (pytest.approx(low), pytest.approx(high))
    (folds,) = ask(
        tmp_path, "{suite: mine, better: better, than: plain, by: 0.045}", splits="folds"
    ).parts
    assert folds.p > one.p  # training sets overlap
    both = ask(
        tmp_path,
        "{suite: mine, better: better, than: plain, by: 0.045},"
        "{suite: mine, better: better, than: plain, by: 0.045}",
    )
    assert both.parts[0].p == pytest.approx(min(1, 2 * plain.pvalue))  # Holm


def test_bytes_and_memberships_are_asked(tmp_path):
    found = ask(
        tmp_path,
        "{suite: mine, saves: better, of: plain, share: 0.2, way: up},"
        "{suite: mine, saves: better, of: plain, share: 0.4},"
        "{suite: mine, recovers: better, what: adjusted_rand, at_least: 0.8},"
        "{suite: mine, recovers: plain, what: adjusted_rand, at_most: 0.8}",
        sent={"better": 70, "plain": 100},
        index={"better": 0.9, "plain": 1.0},
    )
    assert [a.answer for a in found.parts] == ["yes", "no", "yes", "no"]
    assert [round(a.mean, 6) for a in found.parts] == [0.3, 0.3, 0.9, 1.0]


def test_words_say_where_it_holds_and_where_not(tmp_path):
    found = ask(
        tmp_path,
        "{suite: mine, better: better, than: plain}, {suite: mine, better: alike, than: plain},"
        "{suite: mine, better: worse, than: plain}, {suite: mine, better: absent, than: plain}",
        reasons="[{suite: mine, better: better, than: worse, asks: it is <so>}]",
    )
    assert found.verdict == "qualified"
    assert sentence(found) == (
        "It is so. Qualified. Holds: mine/one, better is better than plain. Does not hold: "
        "mine/one, worse is better than plain. Cannot tell: mine/one, alike is better than plain. "
        "Not measured: on mine."
    )
    assert found.parts[3].answer == "not measured"
    assert found.parts[3].note == "lacks absent on mine/one"
    assert ask(tmp_path, "{suite: other, better: better, than: plain}") is None


def test_other_patients_are_not_compared(tmp_path):
    asked = "{suite: mine, better: better, than: plain}"
    with pytest.raises(ConfigError, match="better with plain on mine, which are not"):
        ask(tmp_path, asked, data={"better": "1"})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("{suite: mine, beter: a, than: b}", "a question has one of better, as_good"),
        ("{suite: mine, better: a}", "a question of better lacks the key 'than'"),
        ("{better: a, than: b}", "a question of better lacks the key 'suite'"),
        ("{suite: mine, better: a, than: b, within: 1}", "has no key 'within'"),
        ("{suite: mine, recovers: a, what: k}", "one of at_least and at_most"),
        ("", "it has no parts"),
    ],
)
def test_a_claim_that_is_none_is_refused_by_name(parts, message, tmp_path):
    with pytest.raises(ConfigError, match=rf"zz_mine\.yaml cannot be read: .*{message}"):
        ask(tmp_path, parts)


def test_every_claim_asks_for_what_its_suites_measure():
    """Names are arms, variants and methods that the suites compare."""
    known = suites()
    for claim in read_claims():
        for question in (*claim.parts, *claim.reasons):
            suite, given = known[question.suite], question.given
            for key in (question.kind, "than", "as", "of", "over", "above"):
                names = given.get(key, [])
                for name in [names] if isinstance(names, str) else names:
                    plain, _, variant = name.partition("@")
                    assert not variant or variant in suite.variants
                    small = suite.sizes["small"].methods
                    compared = (*ALWAYS, *suite.methods)
                    assert plain in suite.arms or small == "all" or plain in {*small, *compared}, (
                        f"{claim.name}: {question.suite} has no {plain}"
                    )
