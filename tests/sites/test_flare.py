"""Over NVIDIA FLARE, by kits with certificates: processes of their own, faults, and no code."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

pytest.importorskip("nvflare", reason="needs NVIDIA FLARE: pip install '.[sites]'")
pytest.importorskip("psutil", reason="needs NVIDIA FLARE: pip install '.[sites]'")

from medfed.run.onboarding import onboard
from medfed.sites.flare import PREFIXES, write_job
from medfed.sites.flare.console import Console
from medfed.standalone.errors import ConfigError
from medfed.studies.plan import read_plan
from scripts.local_federation import SERVER, LocalFederation
from tests.sites.hospitals import as_left, same
from tests.sites.studies import KEYS, exported, plain, simulation, written

pytestmark = [pytest.mark.sites, pytest.mark.timeout(600)]  # a busy machine imports slowly
ROOT = Path(__file__).resolve().parents[2]
SITES = ["hospital_0", "hospital_1", "hospital_2", "hospital_3"]
TWO = SITES[:2]
ECHO = "tests.sites.echo"
CLINICAL = ["experiment=clinical_pfednet", "partition.num_clients=3", "local.steps=2", "rounds=60"]


def python(*arguments, **rest):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **rest,
    )


def told(federation, job="none"):
    """What FLARE says of a job, or who is connected."""
    with python("-m", "tests.sites.hand_in", federation.admin, job, cwd=ROOT) as process:
        lines = process.communicate(timeout=300)[0].splitlines()
    return json.loads(lines[-1])


def deploying(federation, *arguments):
    """``medfed deploy`` as a process."""
    command = f"from medfed.commands.main import main; main({['deploy', *arguments]!r})"
    return python("-c", command, cwd=federation.folder)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """One server and four sites for all tests, each a process."""
    with LocalFederation(tmp_path_factory.mktemp("kits"), SITES, (*PREFIXES, ECHO)) as found:
        for site in SITES:
            found.write_site(site)
        end = time.monotonic() + 240
        while SERVER not in str((found.folder / f"{SERVER}.log").read_text()):
            assert time.monotonic() < end
        time.sleep(3)
        while told(found) != SITES:
            assert time.monotonic() < end
        yield found


def test_kits_let_no_code_in_and_no_log_out(federation):
    for name in (SERVER, *SITES):
        local = federation.kit(name) / "local"
        resources = json.loads((local / "resources.json").read_text())
        assert {*PREFIXES} <= {*resources["class_allow_list"]}
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert resources["allow_log_streaming"] is False
        assert all("log_streamer" not in one["path"] for one in resources["components"])
        rights = json.loads((local / "authorization.json").read_text())["permissions"]
        assert rights["lead"]["byoc"] == "none"
        assert rights["lead"]["shell_commands"] == "none"


def test_bytes_come_back_as_they_went_and_who_is_slow_is_silent(federation, tmp_path):
    out, job = tmp_path / "out.json", tmp_path / "echo"
    write_job(job, TWO, (f"{ECHO}.Server", {"out": str(out)}), (f"{ECHO}.Site", {}))
    assert told(federation, job)[0] == "FINISHED:COMPLETED"  # other sites are connected, too
    found = json.loads(out.read_text())
    assert found.pop("seconds") < 15
    assert found == {"sites": TWO, "equal": True, "slow": "silent", "absent": "silent"}
    kept = federation.kit(SERVER) / "jobs"  # not in /tmp, where other users reach them
    assert {path.name for path in kept.iterdir()} >= {"jobs-storage", "snapshot-storage"}


def test_a_job_with_code_is_refused_by_the_sites(federation, tmp_path):
    job = tmp_path / "echo"
    write_job(job, TWO, (f"{ECHO}.Server", {"out": "x"}), (f"{ECHO}.Site", {}))
    (job / "site" / "custom").mkdir()
    (job / "site" / "custom" / "more.py").write_text("raise SystemExit\n")
    status, reason = told(federation, job)
    assert status == "FINISHED:FAILED_TO_RUN"
    assert "BYOC not permitted" in reason


@pytest.fixture(scope="module")
def disturbed(federation, tmp_path_factory):
    """A run of two sites, in which a worker and the server were killed; its simulation beside."""
    tmp_path = tmp_path_factory.mktemp("disturbed")
    kept_out = (f"keep_out=[{SITES[2]}]", f"hydra.run.dir={tmp_path / 'simulation'}")
    train = (ROOT / "scripts/train.py", *CLINICAL, *kept_out)
    said, rounds, killed = [], 0, []
    asked = (f"sites={','.join(TWO)}", "cut=true", f"kit={federation.admin}")
    with deploying(federation, *CLINICAL, *asked, f"folder={tmp_path / 'run'}") as process:
        for line in process.stdout:
            said.append(line.strip())
            rounds = 0 if "has ended" in line else rounds + line.startswith("round ")
            if rounds == 2 and not killed:
                killed.append("worker")
                federation.processes(TWO[1])[-1].kill()
            elif rounds == 2 and killed == ["worker"] and any("ended" in s for s in said):
                killed.append("server")
                federation.kill(SERVER)
                federation.start(SERVER)
    assert process.returncode == 0, said
    assert killed == ["worker", "server"]
    assert sum("FLARE's job has ended" in line for line in said) == 2, said
    with python(*train) as simulation:
        simulation.communicate(timeout=300)
    return tmp_path, said


def test_a_worker_and_the_server_are_killed_and_nothing_is_lost(disturbed):
    """Each time the job is handed in again; what is left equals an undisturbed simulation."""
    tmp_path, said = disturbed
    assert not same(tmp_path / "run", tmp_path / "simulation")
    assert any("Results and pictures" in line for line in said)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "send_request" not in log


def test_a_hospital_joins_the_finished_run(federation, disturbed):
    """It has had no part in the job before; what it gets equals the simulation's onboarding."""
    folder, new = disturbed[0], SITES[2]
    joining = (f"run={folder / 'run'}", f"onboard={new}", "onboard_steps=4")
    with deploying(federation, *joining, f"kit={federation.admin}") as process:
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    (expected,) = (
        r for r in onboard(folder / "simulation", new, [1000], 4).rows if r.rule == "own"
    )
    (found,) = json.loads((folder / "run" / "onboarding.json").read_text())["rows"]
    assert found["metrics"] == as_left(expected.metrics)
    assert (found["up"], found["down"]) == (expected.up, expected.down)
    (own,) = (federation.folder / new).glob("*-joined")
    assert (own / "bundle" / new).is_dir()


MASKED = (
    *("experiment=clinical_pfednet", "algorithm=fedavg", "partition.num_clients=4"),
    *("local.steps=2", "rounds=2", "channel.secure=masks"),
)


def masked(federation, folder, *overrides):
    """Runs four sites under masks; returns what the coordinator prints."""
    asked = (f"sites=[{','.join(SITES)}]", "cut=true", f"kit={federation.admin}")
    with deploying(federation, *MASKED, *overrides, *asked, f"folder={folder}") as process:
        said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    return said


def fingerprints(federation):
    """The fingerprint of each site's certificate, from its kit."""
    paths = {c: federation.kit(c) / "startup" / "client.crt" for c in SITES}
    return {
        c: x509.load_pem_x509_certificate(path.read_bytes()).fingerprint(SHA256()).hex()
        for c, path in paths.items()
    }


def simulated(folder, *overrides):
    """The same without sites."""
    with python(ROOT / "scripts/train.py", *MASKED, *overrides, f"hydra.run.dir={folder}") as run:
        run.communicate(timeout=300)


@pytest.fixture(scope="module")
def summed(federation, tmp_path_factory):
    """The folder of a run of four sites under masks."""
    folder = tmp_path_factory.mktemp("masked") / "run"
    masked(federation, folder)
    return folder


def test_four_sites_under_masks_equal_the_simulation(federation, summed, tmp_path):
    """Each site signs its keys by the certificate of its kit, and writes down those of all."""
    simulated(tmp_path)
    assert not same(summed, tmp_path)
    kinds = (summed / "traffic.csv").read_text()
    assert all(f",{kind}," in kinds for kind in ("keys", "shares", "unmask"))
    for site in SITES:
        pinned = json.loads((federation.folder / site / "certificates.json").read_text())
        assert pinned == fingerprints(federation)


def test_a_site_sums_with_no_peer_whose_certificate_has_changed(federation, summed, tmp_path):
    """The others go on without it, as in a simulation in which it is absent."""
    wary, peer = SITES[:2]
    path = federation.folder / wary / "certificates.json"
    path.write_text(json.dumps({**fingerprints(federation), peer: "0" * 64}))
    masked(federation, tmp_path / "run", "seed=1")
    path.write_text(json.dumps(fingerprints(federation)))  # for the tests that follow
    absences = json.loads((tmp_path / "run" / "absences.json").read_text())
    assert absences["absent"] == {str(n): [wary] for n in range(2)}
    log = (federation.folder / wary / "log.txt").read_text()
    assert f"{peer} has another certificate than before" in log
    simulated(tmp_path / "simulation", "seed=1", absences["simulation"])
    across, expected = (
        json.loads((tmp_path / run / "hashes.json").read_text()) for run in ("run", "simulation")
    )
    states = ("server", *(f"client/{site}" for site in SITES if site != wary))
    assert {state: across[state] for state in states} == {s: expected[s] for s in states}


STUDIES = {
    "statistics": """
columns: {age: [20, 40, 60, 80, 100], sex: [f, m], outcome: ["0", "1"]}
by: outcome
models: [{of: [age, sex]}, {of: [age], join: estimates}]
""",
    "evaluate": """
columns: {sex: [f, m], outcome: ["0", "1"]}
bundles: [{name: NEW, path: BUNDLE}]
patients: all
evaluate: {scores: [NEW, score], reference: score, by: [sex], cells: 10}
""",
}


@pytest.fixture(scope="module")
def tables(federation, tmp_path_factory):
    """A table at each site, whose file allows models; afterwards the files are as before."""
    folder = written(tmp_path_factory.mktemp("tables"), SITES)
    for site in SITES:
        own = {"data": {"path": str(folder / f"{site}.csv")}}
        federation.write_site(site, **own, policy={"evaluate_models": True, "plans": 9})
    yield folder
    for site in SITES:
        federation.write_site(site)


@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_has_the_numbers_of_the_simulation(federation, tables, tmp_path, kind):
    """To the last bit: sums under masks, estimates, and a bundle that travels once."""
    path = tmp_path / "plan.yaml"
    bundle = str(exported(tables, tmp_path, SITES[0])) if kind == "evaluate" else ""
    path.write_text(STUDIES[kind].replace("BUNDLE", bundle), encoding="utf-8")
    asked = (*KEYS[:-1], f"sites=[{','.join(SITES)}]", f"study={path}")
    where = (f"kit={federation.admin}", f"folder={tmp_path / 'study'}")
    with deploying(federation, *asked, *where) as process:
        said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    found = json.loads((tmp_path / "study" / "study.json").read_text(encoding="utf-8"))
    assert found["remarks"] == []
    expected = plain(simulation(tables, read_plan(path), names=SITES))
    assert [(t["title"], t["head"], t["lines"]) for t in found["tables"]] == expected
    assert (tmp_path / "study" / "study.html").is_file()


def test_a_prefix_that_is_not_allowed_is_one_sentence(federation, tmp_path):
    path = federation.kit(TWO[1]) / "local" / "resources.json"
    kept = path.read_text()
    path.write_text(kept.replace('"medfed.sites.flare"', '"nothing"'))
    asked = (f"sites={','.join(TWO)}", "cut=true", f"kit={federation.admin}")
    try:
        with deploying(federation, *CLINICAL, *asked, f"folder={tmp_path / 'run'}") as process:
            said = process.communicate(timeout=300)[0]
    finally:
        path.write_text(kept)
    assert process.returncode == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: FLARE ended the job before its first round")
    assert ", ".join(PREFIXES) in last


def test_a_site_that_never_connects_is_named(federation, tmp_path):
    asked = ("sites=[hospital_0,hospital_9]", "terms.patience=0", "cut=true")
    more = (f"kit={federation.admin}", f"folder={tmp_path / 'run'}")
    with deploying(federation, *CLINICAL, *asked, *more) as process:
        said = process.communicate(timeout=240)[0].strip().splitlines()
    assert said[-1].startswith("error: hospital_9 did not connect")
    assert not (tmp_path / "run").exists()


def test_what_is_no_kit_is_said():
    with pytest.raises(ConfigError, match=r"not a coordinator's kit of FLARE .*fed_admin\.json"):
        Console(ROOT)
