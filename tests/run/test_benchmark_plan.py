"""Suites, search spaces, keys of cells: what is decided before anything is run."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import threading
import time
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from medfed.benchmark import runner
from medfed.benchmark.plan import Group, groups, shard_of
from medfed.benchmark.runner import run_groups
from medfed.benchmark.suite import (
    ALWAYS,
    Arm,
    Method,
    Size,
    Variant,
    chosen_arms,
    chosen_methods,
    chosen_suites,
    read_suite,
    search_space,
    suites,
    trial_settings,
    wanted_of,
)
from medfed.commands.advise import check_methods
from medfed.commands.benchmark import main
from medfed.commands.methods import method, yamls
from medfed.config.spelling import with_plugins
from medfed.federation.card import Range, tuned
from medfed.records.cells import code_hash, hash_of, read_code
from medfed.standalone.errors import ConfigError, RankError
from medfed.standalone.files import locked
from tests.pages import DOCS

GOOD = """
title: A test
experiment: clinical_pfednet
lr: [0.01, 0.1]
splits: folds
variants: {base: {}}
sizes:
  smoke: {splits: 1, trials: 1}
  small: {splits: 1, trials: 1}
  full: {splits: 1, trials: 1}
"""


@pytest.mark.parametrize("name", suites())
def test_every_suite_composes(name, tmp_path):
    """All variants and sizes at once: an unknown key or option of any would be refused."""
    suite = suites()[name]
    kinds = [*suite.variants.values()]
    others = [k for k in kinds if any(o.startswith("model=") for o in k.overrides)]  # other keys
    for together in ([k for k in kinds if k not in others], *([k] for k in others)):
        composes(replace(suite, variants={str(n): k for n, k in enumerate(together)}), tmp_path)


def composes(suite, tmp_path):
    every = [
        o for part in (*suite.sizes.values(), *suite.variants.values()) for o in part.overrides
    ]
    name, whole = suite.name, replace(suite, variants={"all": Variant(tuple(every))})
    methods = {name: chosen_methods(["fedavg"], [], ["fedavg"])[1:2]}
    places = {name: str(tmp_path)} if suite.path else {}
    (group,), told = groups([whole], methods, "small", "all", places)
    assert not told
    assert group.config("all").evaluation.every <= group.config("all").rounds
    keys = [group.cell("all", "final", 0, split, {}).key for split in (0, 1, 0)]
    assert keys[0] == keys[2] != keys[1]
    assert len(suite.methods) >= 3
    assert set(suite.methods) <= set(yamls())


def test_a_suite_has_settings_of_single_methods():
    """They come after those of the suite and its size; what is tuned comes after them."""
    given = {"local": ("local.steps=7",)}
    suite = replace(suites()["digits"], by_method=given)
    methods = {"digits": chosen_methods(["ditto"], [], ["ditto"])}
    found = {g.method.name: g for g in groups([suite], methods, "small")[0]}
    steps = {name: group.config(suite.base).local.steps for name, group in found.items()}
    assert steps["local"] == 7 != steps["ditto"] == steps["fedavg"]
    assert (
        found["local"].cell(suite.base, "final", 0, 0, {"local.steps": 9}).config["local"]["steps"]
        == 9
    )


@pytest.mark.parametrize(("bits", "share"), [(2, 2), (32, 1)], ids=["2 bits", "32 bits"])
def test_steps_are_fewer_by_the_passes_of_the_run_s_own_bits(bits, share):
    suite = replace(suites()["digits"], by_method={"qupel": (f"algorithm.bits={bits}",)})
    (*_, group), _ = groups([suite], {"digits": chosen_methods(["qupel"], [], ["qupel"])}, "small")
    config = group.cell(suite.base, "final", 0, 0, {}).config
    assert config["algorithm"]["bits"] == bits
    assert config["local"]["steps"] == group.config(suite.base).local.steps // share


def test_real_data_that_are_not_at_hand_are_told():
    methods = {"heart": chosen_methods([], [], [])}
    found, told = groups(chosen_suites("heart"), methods, "small")
    assert not found
    assert told == [
        "suite=heart is left out, as it needs data; name their folder by paths.heart=FOLDER."
    ]
    with pytest.raises(ConfigError, match=r"paths\.heart=/no/such does not exist"):
        groups(chosen_suites("heart"), methods, "small", paths={"heart": "/no/such"})


def test_a_cell_knows_files_whose_names_are_not_utf_8(tmp_path):
    keys = []
    for name in (b"\xfe.data", b"\xff.data"):
        folder = tmp_path / name.hex()
        folder.mkdir()
        (folder / os.fsdecode(name)).write_text("x")
        methods = {"heart": chosen_methods(["fedavg"], [], ["fedavg"])[1:2]}
        (group,), _ = groups(chosen_suites("heart"), methods, "small", None, {"heart": str(folder)})
        keys.append(group.cell(group.suite.base, "final", 0, 0, {}).key)
    assert keys[0] != keys[1]


@pytest.mark.parametrize("name", yamls())
def test_what_a_method_tunes_its_yaml_has(name):
    found = method(name, yamls()[name])
    keys = yaml.safe_load(found.yaml.read_text())
    for key, over in tuned(found.kind).items():
        assert keys[key] is not None
        assert over.low < over.high
        assert not over.log or over.low > 0
        if isinstance(keys[key], int | float):
            assert over.low <= keys[key] <= over.high, f"{name}'s default {key} is out of range"


def test_all_methods_try_the_same_learning_rates_after_their_defaults():
    lr = Range(0.01, 1.0)
    kinds = [method(n, yamls()[n]).kind for n in ("fedavg", "ditto", "clusteredfl")]
    tried = [trial_settings(search_space(kind, lr), 6) for kind in kinds]
    assert [len(t) for t in tried] == [6, 6, 6]
    assert [t[0] for t in tried] == [{}, {}, {}]
    rates = [[p["optimizer.lr"] for p in t[1:]] for t in tried]
    assert rates[0] == rates[1] == rates[2]
    assert all(lr.low <= rate <= lr.high for rate in rates[0])
    assert len(set(rates[0])) == 5


def test_jobs_share_the_work_and_nothing_is_done_twice():
    work = [f"group {n}" for n in range(7)]
    jobs = [list(shard_of(work, f"{i}/3")) for i in (1, 2, 3)]
    assert sorted(one for job in jobs for one in job) == work
    assert list(shard_of(work, None)) == work


def test_further_variants_have_few_methods_unless_they_are_somebody_s_choice():
    suite = suites()["digits"]
    every = {"digits": chosen_methods(None, suite.sizes["small"].methods, list(yamls()))}
    assert len(every["digits"]) > 40
    for named in (False, True):
        found, _ = groups([suite], every, "small", "all", named=named)
        where = {group.method.name: group.variants for group in found}
        assert list(where) == [m.name for m in every["digits"]]
        everywhere = {name for name, variants in where.items() if len(variants) > 1}
        assert everywhere == ({*where} if named else {*ALWAYS, *suite.methods})
        assert all(variants[0] == suite.base for variants in where.values())
    found, _ = groups([suite], every, "small", ["names_1"], named=False)
    assert {group.method.name for group in found} == {*ALWAYS, *suite.methods}


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "a/b", "1/3/5"])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(ConfigError, match=f"shard={shard} must be i/n"):
        list(shard_of(["a"], shard))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("title:", "titel:"), r"mine\.yaml cannot be read: it has no key 'titel' \(did you mean"),
        (("lr: [0.01, 0.1]\n", ""), r"it lacks the key lr"),
        (("lr: [0.01, 0.1]", "lr: [0.1, 0.01]"), r"lr=\[0\.1, 0\.01\] must be two positive"),
        (("splits: folds", "splits: random"), r"splits=random is unknown; choose sample, seed or"),
        (("variants: {base: {}}", "variants: {}"), r"it lacks the key variants"),
        (("  full: {splits", "  ful: {splits"), r"the size ful is unknown; choose smoke, small, f"),
        (("smoke: {splits: 1", "smoke: {splits: 0"), r"sizes\.smoke: splits: expected int >= 1"),
        (("title: A test", "title: [A test"), r"cannot be read: "),
        (("lr: [0.01, 0.1]", "lr: [0.1]"), r"lr: expected array of length 2, got 1"),
        (("lr: [0.01, 0.1]", "lr: much"), r"lr: expected array, got str"),
        (
            ("splits: 1, trials: 1", "splits: two, trials: 1"),
            r"sizes\.smoke: splits: expected int, got str",
        ),
        (("trials: 1}", "trails: 1}"), r"sizes\.smoke has no key 'trails' \(did you mean trials"),
        (
            ("base: {}", "base: {overide: [rounds=1]}"),
            r"variants\.base has no key 'overide' \(did ",
        ),
        (("base: {}", "base: [rounds=1]"), r"variants\.base must have keys, and is \['rounds=1'\]"),
        (("title:", "arms: {a: {metod: ditto}}\ntitle:"), r"arm a has no key 'metod' \(did"),
        (("title:", "arms: {a: {}}\ntitle:"), r"the arm a lacks the key method"),
        (
            ("title:", "arms: {a/b: {method: ditto}}\ntitle:"),
            r"the arm 'a/b' must be named by letters",
        ),
        (
            ("title:", "arms: {a: {method: ditto, variant: bse}}\ntitle:"),
            r"variant=bse, which is no",
        ),
        (("title:", "arms: {a: {method: ditto, splits: 0}}\ntitle:"), r"splits: expected int >= 1"),
        (
            ("title:", "arms: {a: {method: ditto, overrides: [algorithm=x]}}\ntitle:"),
            r"the arm a sets algorithm; its key method",
        ),
    ],
)
def test_a_suite_that_is_none_is_refused_by_name(change, message, tmp_path):
    file = tmp_path / "mine.yaml"
    assert change[0] in GOOD
    file.write_text(GOOD.replace(*change))
    with pytest.raises(ConfigError, match=message) as caught:
        read_suite(file)
    assert "\n" not in str(caught.value)


def test_a_suite_may_have_one_size_alone(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD.replace("  full: {splits: 1, trials: 1}\n", ""))
    assert read_suite(file).sized("smoke").splits == 1
    with pytest.raises(ConfigError, match=r"suite=mine has no size=full; it has smoke, small\."):
        read_suite(file).sized("full")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("splits: folds", "splits: folds\noverrides: [local.steps=null]"),
            r"mine has no local\.steps, without",
        ),
        (
            ("clinical_pfednet", "clinical_pfedn"),
            r"suite=mine: Unknown experiment 'clinical_pfedn'",
        ),
        (("base: {}", "base: {overrides: [roundz=1]}"), r"suite=mine: Unknown key 'roundz' \(did"),
    ],
)
def test_a_suite_that_does_not_compose_is_refused_by_name(change, message, tmp_path):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "mine.yaml").write_text(GOOD.replace(*change))
    (suite,) = chosen_suites("mine", [tmp_path])
    methods = {"mine": chosen_methods([], [], [])[:1]}
    (group,), _ = groups([suite], methods, "smoke")
    with pytest.raises(ConfigError, match=message) as caught:
        group.config("base")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("suite=digitz", r"Unknown suite 'digitz' \(did you mean digits"),
        ("suite=[digits,mine] plugins=OWN", ""),
        ("suite=digits size=medium", r"size='medium' is unknown; choose one of smoke, small"),
        ("suite=digits methods=[dito]", r"Unknown method 'dito' \(did you mean ditto"),
        ("suite=digits methods=all", ""),
        ("suite=digits variants=[names_1,names_3]", r"variants=names_3 is none of suite=digits"),
        ("suite=digits arms=apart", r"arms=apart is none of suite=digits"),
        ("suite=digits shard=4", r"shard=4 must be i/n"),
        ("suite=digits report_only=maybe", r"report_only must be true or false, not 'maybe'"),
        (
            "suite=heart paths.hart=OWN",
            r"paths\.hart names no suite that needs .* mean heart, flamby_heart\?\)",
        ),
        (
            "suite=heart paths.digits=OWN",
            r"paths\.digits names no suite that needs data; those are",
        ),
        ("suite=heart paths.heart=/no/such", r"paths\.heart=/no/such does not exist"),
        ("suite=real plugins=OWN paths.real=OWN", ""),
        ("suite=real plugins=OWN paths.real=/no", r"paths\.real=/no does not exist"),
    ],
)
def test_what_is_named_is_looked_up_before_anything_is_run(words, sentence, tmp_path, monkeypatch):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "mine.yaml").write_text(GOOD)
    (tmp_path / "suites" / "real.yaml").write_text(GOOD + "path: true\n")
    begun, told = [], io.StringIO()
    monkeypatch.setattr("medfed.benchmark.main.benchmark", lambda *a, **k: begun.append(k))
    monkeypatch.chdir(tmp_path)
    with redirect_stderr(told), suppress(SystemExit):
        main(words.replace("OWN", str(tmp_path)).split())
    if sentence:
        assert not begun
        assert re.fullmatch(rf"error: .*{sentence}.*\n", told.getvalue())
    else:
        assert len(begun) == 1, told.getvalue()
        if "paths.real" in words:
            assert begun[0]["paths"]["real"] == str(tmp_path)


def test_a_suite_of_one_s_own_is_one_file(tmp_path):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "mine.yaml").write_text(GOOD)
    (found,) = chosen_suites("mine", [tmp_path])
    assert found.title == "A test"
    with pytest.raises(ConfigError, match=r"Unknown suite 'mine'"):
        chosen_suites("mine")
    with pytest.raises(ConfigError, match=r"variants=bse is none of suite=mine \(did you"):
        found.chosen("bse")
    with pytest.raises(ConfigError, match=r"Unknown method 'dito' \(did you mean ditto"):
        chosen_methods(["dito"], [], list(yamls()))
    assert [m.name for m in chosen_methods(None, [], [])] == list(ALWAYS)


ARMS = """
arms:
  apart: {method: ditto, overrides: [algorithm.strength=0], splits: 1}
  seldom: {method: ditto, times: {rounds: 0.5, local.steps: 2}}
  wrong: {method: ditto, times: {name: 2}}
"""


def test_an_arm_is_its_method_with_something_changed(tmp_path):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "mine.yaml").write_text(GOOD.replace("trials: 1", "trials: 3") + ARMS)
    (suite,) = chosen_suites("mine", [tmp_path])
    methods = {"mine": chosen_methods(["ditto"], [], list(yamls()))[-1:]}
    arms = chosen_arms(["apart", "seldom"], {"mine": suite.arms}, yamls())
    (ditto, apart, seldom), _ = groups([suite], methods, "small", arms=arms)
    assert [c.key for c in apart.tuning] == [c.key for c in ditto.tuning]  # tuned as it is
    (own,) = apart.final(2)
    assert own.place == "mine/base/apart/final_trial_2_split_0"
    assert own.config["algorithm"]["strength"] == 0  # not what was tuned
    assert own.config["optimizer"]["lr"] == ditto.final(2)[0].config["optimizer"]["lr"]
    assert own.key != ditto.final(2)[0].key
    (own,) = seldom.final(0)
    base = ditto.final(0)[0].config
    assert (own.config["rounds"], own.config["local"]["steps"]) == (15, 40)
    assert base["rounds"] * base["local"]["steps"] == 15 * 40 == seldom.budget
    wrong = groups([suite], methods, "small", arms={"mine": [suite.arms["wrong"]]})[0][-1]
    with pytest.raises(ConfigError, match=r"arm wrong: times\.name names no whole number"):
        wrong.final(0)


def test_arms_that_there_are_not_are_refused_by_name():
    arms = {"mine": {"apart": Arm("ditto", name="apart")}}
    assert not chosen_arms(False, arms)["mine"]
    with pytest.raises(ConfigError, match=r"arms=apat is none of suite=mine \(did you mean apart"):
        chosen_arms("apat", arms)
    with pytest.raises(ConfigError, match=r"suite=mine: the arm apart has the name of a method"):
        chosen_arms(True, arms, ["apart"])


@pytest.mark.parametrize("name", [n for n, s in suites().items() if s.arms])
def test_every_arm_composes(name, tmp_path):
    """Those of one method that choose the same options at once."""
    suite = suites()[name]
    places = {name: str(tmp_path)} if suite.path else {}
    alike = {}
    for arm in chosen_arms(True, {name: suite.arms}, yamls())[name]:
        options = frozenset(o for o in arm.overrides if o.partition("=")[2].isidentifier())
        before = alike.get((arm.method, options), arm)
        every = (*before.overrides, *arm.overrides), {**before.times, **arm.times}
        alike[arm.method, options] = replace(arm, overrides=every[0], times=every[1])
    arms = [arm for arm in alike.values() if arm.overrides or arm.times]
    for group in groups([suite], {name: []}, "small", paths=places, arms={name: arms})[0]:
        assert group.config(group.variants[0], True).rounds >= 1


def another_process():
    """What a process has loaded is hashed once."""
    read_code.cache_clear()
    hash_of.cache_clear()


def test_comments_do_not_change_the_hash_of_code_and_code_does(tmp_path):
    module, helper = tmp_path / "own_code_module.py", tmp_path / "own_code_helper.py"
    helper.write_text("def f():\n    return 1\n")
    module.write_text('"""One."""\nfrom own_code_helper import f\n\ndef g():\n    return f()\n')
    with_plugins([f"plugins={tmp_path}"])
    first = code_hash(["own_code_module.g"])
    module.write_text('"""Another."""\n# why\nfrom own_code_helper import f\ndef g(): return f()\n')
    assert code_hash(["own_code_module.g"]) == first  # of what this process may have loaded
    another_process()
    assert code_hash(["own_code_module.g"]) == first
    helper.write_text("def f():\n    return 22\n")  # what it imports
    another_process()
    second = code_hash(["own_code_module.g"])
    assert second != first
    assert code_hash(["own_code_module.g", "medfed.personalize.ditto.Ditto"]) != second


def test_the_suite_of_the_documents_is_one(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "benchmark.md").read_text(), re.DOTALL)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "mine.yaml").write_text(block)
    (suite,) = chosen_suites("mine", [tmp_path])
    methods = {"mine": chosen_methods(["fedavg"], [], ["fedavg"])[1:2]}
    (group,), _ = groups([suite], methods, "smoke", "all", {"mine": str(tmp_path)})
    assert group.config("other").data.scaling == "client"
    assert group.budget == 2 * 20


def test_a_process_that_dies_ends_the_benchmark_with_a_sentence(tmp_path):
    def kill() -> None:
        while not (workers := multiprocessing.active_children()):
            time.sleep(0.01)
        for worker in workers:
            worker.kill()

    group = Group(suites()["diabetes"], Method.of("local"), ("power_1",), Size(1, 1))
    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RankError, match=r"ended while it ran a cell .*out of memory.*kept"):
        run_groups([group], tmp_path, 1)
    thread.join()


def test_what_a_killed_benchmark_left_is_removed_and_nobody_else_s(tmp_path, monkeypatch):
    monkeypatch.setattr(runner.tempfile, "tempdir", str(tmp_path))
    named = {name: tmp_path / f"{runner.SCRATCH}{name}" for name in ("left", "works", "new", "his")}
    for name, folder in named.items():
        (folder / "medfed-cell-1").mkdir(parents=True)
        if name != "his":
            (folder / "lock").touch()
        if name != "new":
            os.utime(folder, (0, 0))
    with locked(named["works"]):
        os.utime(named["works"], (0, 0))
        with runner.scratch() as own:
            there = {path.name for path in tmp_path.iterdir()}
    kept = {named[name].name for name in ("works", "new", "his")}
    assert there == {*kept, own.rpartition("/")[2]}
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("below", ["", "configs"])
def test_every_command_knows_the_methods_and_suites_of_a_plugin_folder(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / below / "algorithm").mkdir(parents=True)
    (tmp_path / below / "algorithm/mine.yaml").write_text("_target_: mine.Mine\n")
    check_methods(["mine"], [str(tmp_path)])
    _, by_suite, _ = wanted_of("digits", ["mine"], "smoke", False, [str(tmp_path)])
    assert [one.name for one in by_suite["digits"]][-1] == "mine"
    assert "mine" in yamls([f"plugins={tmp_path}"])
