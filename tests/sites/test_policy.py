"""A site runs what its file approves, within the limits of its policy; each veto has a sentence."""

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from medfed.common.untrusted import read_json
from medfed.config.compose import described
from medfed.delivery.main import keep_bundle
from medfed.run.evaluation import measure_across
from medfed.sites import policy, wire
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.deploying import encoded, start_site
from medfed.sites.installed import TEMPLATES
from medfed.sites.policy import NO_LIMITS, Counted, Policy
from medfed.sites.run import coordinate
from medfed.sites.wire import Evaluate, Hello, Reply, Request, declined
from medfed.sites.words import VetoError, words_for
from medfed.standalone.errors import ConfigError, SiteError
from medfed.standalone.files import filled
from tests.integration.runs import run
from tests.sites.direct import Direct
from tests.sites.hospitals import IMPATIENT, QUICK, as_left
from tests.sites.tables import EXPERIMENT, write_table

TWO = ("Basel", "Bern")
FEDAVG = (*EXPERIMENT[:-2], "algorithm=fedavg", "data.batch_size=4", "rounds=1")


@pytest.fixture
def agreed():
    return Agreed(TWO, FEDAVG)


@pytest.fixture
def start(tmp_path, agreed):
    """Starts a hospital as FLARE's process does, by the further lines of its file."""

    def started(lines="", name="Basel", study=agreed):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        write_table(folder / "ours.csv", (name,))
        text = f"site: {name}\ndata: {{path: ours.csv}}\n{lines}\n"
        (folder / "medfed.yaml").write_text(text)
        return start_site(folder / "medfed.yaml", encoded(study.record()), name, keep_bundle, print)

    return started


def hello(site):
    reply = Reply.from_bytes(site.answer(Hello("Basel", "s").to_bytes()))
    return reply.status, reply.reason


def test_only_an_approved_agreement_runs(start, agreed, tmp_path, caplog):
    other = Agreed(TWO, (*FEDAVG, "local.steps=1"))
    assert other.digest != agreed.digest
    assert hello(start(f"agreed: {agreed.digest}")) == ("ok", "")
    assert hello(start(f"agreed: [{other.digest}, {agreed.digest}]")) == ("ok", "")
    assert hello(start("agreed: []")) == ("refused", "agreed")
    pinned = start(f"agreed: {agreed.digest}", study=other)
    (tmp_path / "Basel" / "ours.csv").unlink()  # nothing is read before it refuses
    assert hello(pinned) == ("refused", "agreed")
    assert f"its agreement is {other.digest}, and the site's file names {agreed.digest}" in (
        caplog.text
    )
    with pytest.raises(SiteError, match="Basel: this study is not approved there"):
        across(tmp_path, other, {"Basel": pinned, "Bern": start(name="Bern", study=other)})


def test_a_site_that_approves_nothing_is_warned(start, agreed, tmp_path):
    assert hello(start()) == ("ok", "")
    log = (tmp_path / "Basel" / "medfed" / "log.txt").read_text()
    assert "has no line agreed, so it takes part in any study" in log
    assert f": agreed: {agreed.digest}" in log


VETOES = {
    "parts: [personal]": "sends the part shared, which policy.parts",
    "parts: [shared]": "sends the part preprocessing, which policy.parts",
    "least: 10": "Patients behind one message (local.steps and data.batch_size): at least 8, and",
    "least: 10, least_per_message: 9": "and policy.least_per_message of this site's file asks",
    "least: 17": "There are 16 validation patients, and policy.least of this site's file asks for",
    "least: 60": "There are 48 training patients, and policy.least of this site's file asks for 60",
}


@pytest.mark.parametrize("policy", VETOES)
def test_a_policy_vetoes_before_anything_leaves(policy, start, tmp_path, caplog):
    assert hello(start(f"policy: {{{policy}}}")) == ("refused", "policy")
    log = tmp_path / "Basel" / "medfed" / "log.txt"
    assert VETOES[policy] in caplog.text + (log.read_text() if log.exists() else "")


FEW = {
    # One row as a sketch, which was sent exactly.
    ("algorithm=pfednet", "algorithm.graph.sketch_inputs=1", "algorithm.graph.sketch_size=1"): (
        "a sketch of training rows (algorithm.graph.sketch_inputs and sketch_size): 1 of at"
    ),
    ("algorithm=ppfl", "algorithm.affinity.kind=data", "algorithm.affinity.sketch_size=12"): (
        "a sketch of training rows (algorithm.affinity.sketch_inputs and sketch_size): 48 of at "
        "least 60"
    ),
    ("algorithm=fedavg", "data.normalization=exact_minmax"): (
        "the smallest and the largest age (data.scaling and data.normalization): 1 of at"
    ),
    ("algorithm=fedavg", "data.val_fraction=0.7"): (
        "the quartiles and sums of age (data.scaling): 8 of at least 20"
    ),
}


@pytest.mark.parametrize("few", FEW, ids=" ".join)
def test_statistics_of_few_patients_are_refused_without_a_policy(few, start, tmp_path):
    study = Agreed(TWO, (*EXPERIMENT[:-2], *few))
    sites = {name: start(name=name, study=study) for name in TWO}
    with pytest.raises(SiteError, match="Basel: its policy, or the least"):
        across(tmp_path, study, sites, IMPATIENT)
    log = (tmp_path / "Basel" / "medfed" / "log.txt").read_text()
    assert FEW[few] in log
    way = "set data.scaling=client." if "(data.scaling" in log else "change algorithm."
    assert f"do not take part, or ask the coordinator to {way}" in log


def across(folder, agreed, sites, terms=QUICK):
    config = described([*agreed.overrides, "data.path=null", f"folder={folder / 'server'}"])
    return coordinate(config, Direct(sites), agreed.sites, terms)


def test_a_site_that_outweighs_the_others_is_refused(start, agreed, tmp_path):
    sites = {"Basel": start("policy: {largest_share: 0.4}"), "Bern": start(name="Bern")}
    with pytest.raises(SiteError, match="Basel: its policy, or the least"):
        across(tmp_path, agreed, sites)
    log = (tmp_path / "Basel" / "medfed" / "log.txt").read_text()
    assert "has 50.0 % of a round's training samples" in log


def test_a_round_that_the_others_miss_is_refused(start, agreed, tmp_path):
    """In a round alone, a site's weights would be the server's result."""
    lines = "policy: {largest_share: 0.6}"
    study = Agreed(TWO, (*FEDAVG[:-1], "rounds=2"))
    sites = {name: start(lines, name, study) for name in TWO}
    calls = sites["Bern"].answer

    def away(request):
        asked = Request.from_bytes(request)
        return declined(asked, "busy").to_bytes() if asked.kind == "fit" else calls(request)

    sites["Bern"].answer = away
    with pytest.raises(SiteError, match="Basel: its policy, or the least"):
        across(tmp_path, study, sites, IMPATIENT)
    log = (tmp_path / "Basel" / "medfed" / "log.txt").read_text()
    assert "Site Basel has 100.0 % of a round's training samples" in log


def test_test_metrics_and_pictures_may_stay_at_a_site(start, agreed, tmp_path, caplog):
    lines = "policy: {test_metrics: 0, pictures: false}"
    sites = {"Basel": start(lines), "Bern": start("policy: {test_metrics: 1}", name="Bern")}
    summary = across(tmp_path, agreed, sites)
    assert summary["not_tested"] == ["Basel"]
    assert "Not tested: Basel: its policy, or the least number" in caplog.text  # it did answer
    assert [*summary["clients"]] == ["Bern"]
    (kept,) = (tmp_path / "Basel" / "medfed").glob("clinical*")
    assert (kept / "models" / "Basel.safetensors").is_file()  # it has its model all the same
    assert "test" in (kept / "metrics.csv").read_text()
    assert not (kept / "pictures").exists()


def test_a_model_is_its_message_the_state_and_the_thresholds(start, tmp_path):
    """One message to each kept state, or with any threshold, gave metrics of any number."""
    study = Agreed(TWO, (*EXPERIMENT[:-2], "algorithm=fedper", "rounds=2", "local.steps=9"))
    sites, said = {n: start("policy: {test_metrics: 1}", n, study) for n in TWO}, []
    honest = sites["Basel"].answer

    def noted(data):
        said.append((Request.from_bytes(data), Reply.from_bytes(honest(data))))
        return said[-1][1].to_bytes()

    sites["Basel"].answer = noted
    across(tmp_path, study, sites)
    asked = [one for one, _ in said if isinstance(one, Evaluate) and one.split == "test"]
    alone, shared = asked  # as an honest coordinator asks: once alone, once with the others' point
    assert alone.point is None
    assert shared.point

    def answer(one, **change):
        return Reply.from_bytes(honest(msgspec.structs.replace(one, **change).to_bytes()))

    assert answer(shared).status == answer(alone, attempt=7).status == "ok"  # also another time
    before = files_in(tmp_path / "Basel")
    for change in ({"variance": 9.0}, {"threshold": 0.1}, {"quantile": 1.0}):
        assert answer(alone, attempt=8, point=change).reason == "policy"
    for number, at in enumerate({-1, 0, 1} - {alone.at}):
        assert answer(alone, attempt=9 + number, at=at).reason == "policy"
    assert files_in(tmp_path / "Basel") == before  # they replaced the model that the site keeps


def test_no_further_run_begins_where_there_are_many_folders(start, agreed, tmp_path):
    """New names of one study filled the disk."""
    sites = {n: start("policy: {folders: 3}", n) for n in TWO}
    across(tmp_path, agreed, sites)
    site, clients = sites["Basel"], sites["Basel"].gate.samples.items()
    given, before = [wire.Client(*each) for each in clients], files_in(tmp_path / "Basel")

    def begun(job):
        return Reply.from_bytes(
            site.answer(wire.Begin("Basel", "s", job=job, clients=given).to_bytes())
        )

    assert [begun(f"{n}" * 32).status for n in range(3)] == ["ok", "ok", "refused"]
    assert begun("1" * 32).status == "ok"  # it has a folder
    log = (tmp_path / "Basel" / "medfed" / "log.txt").read_text()
    assert "There are 3 folders of other runs, and policy.folders of this site's file" in log
    new = {name.split("/")[1] for name in {*files_in(tmp_path / "Basel")} - {*before}}
    assert {name[:10] for name in new} == {"clinical-0", "clinical-1"}


def files_in(folder):
    """The content of all files but the logs."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".txt", ".lock"))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def test_models_are_counted_over_restarts(tmp_path):
    once = Counted(tmp_path / "answered.json", "a")
    once.add(("test_metrics", "model", 1))
    once.add(("test_metrics", "model", 1))
    with pytest.raises(VetoError, match=r"test metrics of model 2, or .*policy\.test_metrics"):
        Counted(tmp_path / "answered.json", "a").add(("test_metrics", "other", 1))
    Counted(tmp_path / "answered.json", "b").add(("test_metrics", "other", 1))
    assert [*json.loads((tmp_path / "answered.json").read_text())] == ["a", "b"]


WRONG = {
    "agreed: yes": "agreed must be the 64 letters and digits",
    "agreed: []\npolicy: {least: many}": r"\(policy\.least: expected int",
    "policy: {lest: 3}": r"policy\.lest is unknown",
    "policy: {largest_share: 0}": r"policy\.largest_share: expected float > 0",
    "policy: [shared]": "policy: expected object, got array",
    # They had no effect, and nobody was told.
    "policy.least: 20": r"write policy\.least as policy: {least: \.\.\.}",
    "trainer.devices: [1]": r"write trainer\.devices as trainer: {devices: \.\.\.}",
}


@pytest.mark.parametrize("lines", WRONG)
def test_a_mistake_in_the_file_is_one_sentence(lines, tmp_path):
    (tmp_path / "medfed.yaml").write_text(f"site: a\n{lines}\n")
    with pytest.raises(ConfigError, match=WRONG[lines]) as caught:
        SiteFile.read(tmp_path / "medfed.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("call", "words"), [("veto", "vetoes"), ("in_words", "wrong")])
def test_each_refusal_has_its_sentence_and_each_sentence_a_refusal(call, words):
    texts = [path.read_text() for path in Path(policy.__file__).parent.rglob("*.py")]
    named = {key for text in texts for key in re.findall(rf'\b{call}\("(\w+)"', text)}
    by_key = {"send_model", "evaluate_models"} if call == "veto" else set()
    assert named | by_key == {*words_for(words)}
    assert all(line.endswith(".") or "{hint}" in line for line in words_for(words).values())


def test_the_example_in_a_kit_can_be_copied(tmp_path):
    example = filled(TEMPLATES / "medfed.yaml.example", name="Bern")
    (tmp_path / "medfed.yaml").write_text(example)
    file = SiteFile.read(tmp_path / "medfed.yaml")
    assert (file.site, file.approved, file.policy.least) == ("Bern", None, 20)
    assert all(f"  {key}: " in example for key in Policy.__struct_fields__[1:])


def test_a_file_without_a_policy_has_no_limits(tmp_path):
    (tmp_path / "medfed.yaml").write_text("site: a\n")
    file = SiteFile.read(tmp_path / "medfed.yaml")
    assert (file.policy, file.approved) == (NO_LIMITS, None)


def test_models_are_tested_at_other_sites_where_both_policies_allow_it(start, agreed, tmp_path):
    lines = {
        "Basel": "{send_model: true, evaluate_models: true}",
        "Bern": "{evaluate_models: true}",
    }
    sites = {name: start(f"policy: {lines[name]}", name) for name in TWO}
    folder = tmp_path / "server"
    across(tmp_path, agreed, sites, replace(QUICK, across=True))
    values = read_json(folder / "across_test.json")
    assert {owner: [*of] for owner, of in values.items()} == {"Basel": [*TWO]}  # Bern's stays there
    tested = read_json(folder / "summary.json")["clients"]["Basel"]
    assert values["Basel"]["Basel"]["auroc"] == tested["auroc"] != values["Basel"]["Bern"]["auroc"]
    assert (folder / "pictures" / "across_test.png").is_file()
    log = (tmp_path / "Bern" / "medfed" / "log.txt").read_text()
    assert "policy.send_model of this site's file does not allow it" in log
    sent = [line for line in (folder / "ledger.csv").read_text().splitlines() if ",across," in line]
    assert ["up" in line for line in sent] == [False, True]


def test_a_model_that_remembers_patients_stays_even_where_the_policy_allows_it(start, tmp_path):
    """Of the other hospital too; the run itself ends as ever."""
    study = Agreed(TWO, (*FEDAVG, "model=mlp", "algorithm=knnper"))
    lines = "policy: {send_model: true, evaluate_models: true}"
    sites = {name: start(lines, name, study) for name in TWO}
    across(tmp_path, study, sites, replace(QUICK, across=True))
    folder = tmp_path / "server"
    assert not (folder / "across_test.json").is_file()
    assert ",across," not in (folder / "ledger.csv").read_text()
    assert (folder / "summary.json").is_file()
    for name in TWO:
        log = (tmp_path / name / "medfed" / "log.txt").read_text()
        assert "The personal model holds features of training patients" in log


@pytest.mark.parametrize("method", ["feddbe", "knnper"])
def test_methods_that_change_the_network_start_from_the_same_weights(method, start, tmp_path):
    study = Agreed(TWO, (*FEDAVG, "model=mlp", f"algorithm={method}"))
    sites = {name: start("", name, study) for name in TWO}
    summary = across(tmp_path, study, sites)
    assert summary["clients"].keys() == {*TWO}


def test_a_finished_run_is_tested_across_when_it_is_resumed(start, agreed, tmp_path):
    """And equals the simulation's table, in the digits that leave."""
    lines = "policy: {send_model: true, evaluate_models: true}"
    sites = {name: start(lines, name) for name in TWO}
    folder = tmp_path / "server"
    across(tmp_path, agreed, sites)
    again = {name: start(lines, name) for name in TWO}
    config = described(
        [*agreed.overrides, "data.path=null", f"folder={folder}", f"resume={folder}"]
    )
    coordinate(config, Direct(again), agreed.sites, replace(QUICK, across=True))
    write_table(tmp_path / "all.csv", TWO)
    path = f"data.path={tmp_path / 'all.csv'}"
    run(tmp_path / "simulation", *agreed.overrides, path)
    expected = measure_across(tmp_path / "simulation")
    assert read_json(folder / "across_test.json") == as_left(expected)
