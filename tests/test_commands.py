"""The command line: help that fits a screen, mistakes that answer before a library is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from medfed import __version__
from medfed.commands.help import COMMANDS
from medfed.commands.main import main
from medfed.commands.methods import yamls
from medfed.config.compose import described
from tests import processes
from tests.pages import DOCS, write_files

# A process that runs a command and tells which libraries it has loaded.
TELL = """
import sys
heavy = ("torch", "monai", "pytorch_lightning", "lightning_fabric", "matplotlib", "scipy", "numba")
from medfed.commands.main import main
try:
    main(sys.argv[1:])
finally:
    print("loaded", *[name for name in heavy if name in sys.modules])
"""
EARLY = {
    "train roundz=3": "Unknown key 'roundz' (did you mean rounds",
    "train algorithm=fedavgg": "Unknown algorithm 'fedavgg' (did you mean fedavg",
    "train data.path=/no/such": "/no/such does not exist; set data.path to",
    "train plugins=/no/such": "plugins names /no/such, which is no folder",
    "train --cfg job roundz=3": "Unknown key 'roundz' (did you mean rounds",
    "train --multrun seed=0,1": "Unknown flag --multrun (did you mean --multirun?)",
    "train --config-dir /tmp": "Unknown flag --config-dir",
    "train --config-name=x": "Unknown flag --config-name",
    "evaluate run=/no/such": "run=/no/such is no run folder",
    "evaluate roun=x": "Unknown key 'roun'",
    "report runs=/no/such": "runs=/no/such is no folder; name one that holds finished runs",
    "benchmark suite=digitz": "Unknown suite 'digitz' (did you mean digits",
    "benchmark suite=digits size=medium": "size='medium' is unknown; choose one of smoke, small",
    "benchmark suite=digits shard=5/4": "shard=5/4 must be i/n, the i-th of n jobs",
    "advise methods=dito": "Unknown method 'dito' (did you mean ditto",
    "advise algorithm=ditto": "algorithm chooses a method, but medfed advise compares methods",
    "advise folds=1": "folds must be a whole number of at least 2, not 1",
    "advise -m seed=0,1": "-m runs a sweep, but medfed advise answers one question",
    "advise data=csv data.path=/no/such": "/no/such does not exist; set data.path to",
    "export run=/no/such": "run=/no/such is no run folder",
    "predict bundle=/no/such input=x output=y": "bundle=/no/such",
    "adopt bundle=/no/such out=x": "task has no value",
    "methods fedavgg": "Unknown method 'fedavgg' (did you mean fedavg",
    "methods unequal_network": "Unknown method 'unequal_network' (did you mean unequal_networks",
    "doctor now": "medfed doctor takes no arguments; leave 'now' out",
    "compare runs=x": "Unknown command 'compare' (it is medfed report now)",
    "tarin": "Unknown command 'tarin' (did you mean train?); the commands are train,",
}
# In this process: what Hydra would take, or answer in its words.
HOSTILE = {
    "train lr=0.1": "Unknown key 'lr' (did you mean optimizer.lr?)",
    "train experiment=digits_pfednet lr=0.1": "Unknown key 'lr' (did you mean optimizer.lr?)",
    "train data=brats_folder data.path=. data.reader.regions=[a,b]": "data.reader.regions is a map",
    "train data=brats_folder data.path=. data.reader.modalities=[a,b]": "data.reader.modalities is "
    "a map; write data.reader.modalities='{FLAIR: FLAIR.nii.gz, T1: T1.nii.gz}'.",
    "train name=null": "name must be a word for the experiment, such as brats, not None.",
    "train name=../../x": "name must be a word for the experiment, such as brats, not '../../x'.",
    "train name=/x": "name must be a word for the experiment",
    "train name=[a,b]": "name must be a word for the experiment",
    "train name=": "name must be a word for the experiment",
    "train algorithm=[fedavg,ditto]": "algorithm=[fedavg,ditto] names a list; choose one option, "
    "or -m algorithm=fedavg,ditto for a run of each.",
    "train seed=1,2": "seed=1,2 is a sweep; add -m for a run of each, or write one value.",
    "train rounds=range(1,3)": "rounds=range(1,3) is a sweep; add -m for a run of each",
    "train seed=choice(1)": "seed=choice(1) is a sweep",
    "train -m seed=glob(*)": "seed=glob(*) names no values; write them, as in seed=0,1 or",
    "train -m seed=interval(1,2)": "seed=interval(1,2) names no values; write them",
    "train +seed=1": "seed is there already; set it by seed=VALUE, without the plus sign.",
    "train privacy.example.epsilon=4": "privacy.example has no keys yet; set it as a whole, as in "
    "privacy.example='{epsilon: VALUE}'.",
    "train evaluation.operating_point.sensitivity=0.9": "evaluation.operating_point has no keys",
    "train experiment=digits_pfednet local.epochs=3": "local.epochs changes nothing beside "
    "local.steps=10; set that to null.",
    "train local.steps=3 local.epochs=3": "local.epochs changes nothing beside local.steps=3",
    "train channel.range=4": "channel.range changes nothing without channel.secure",
    "train channel.up.cer.relative=false": "changes nothing without channel.up.cer.gamma",
    "train +sed=1": "Unknown key 'sed' (did you mean seed",
    "train ++note.text=a": "Unknown key 'note.text'",
    "train +pictures.kind=png": "Unknown key 'pictures.kind'; pictures has format.",
    "train +=1": "'+=1' is no override; write key=value.",
    "evaluate +splitt=val": "Unknown key 'splitt' (did you mean split?)",
    "train +canonical=[null]": "+canonical=[null] names a list; choose one option, or",
    "train codec.down=${nothing}": "codec.down cannot be resolved: Interpolation key 'nothing'",
    "train experiment=clinical_pfednet data.categorical=[[1],[2]]": "data.categorical[0] must be",
    "train ~rounds": "~rounds would leave out a key; set it by rounds=VALUE.",
    "train ~local.steps": "~local.steps would leave out a key; set it by local.steps=VALUE.",
    "train scheduler=-1": "scheduler=-1 is no option; choose one by scheduler=NAME.",
    "train scheduler._partial_=null": "scheduler._partial_ says how medfed builds a part; leave",
    f"evaluate run={'x' * 300}": "is no path here (File name too long); name another",
    f"report runs={'x' * 300}": "is no path here (File name too long); name another",
    f"train data.path={'x' * 300}": "is no path here (File name too long); name another",
    "train init.weights=. init.rename=3": "init.rename must be a map, not 3.",
    "train cohort.clients=a": "must be a list or null, not 'a'; write cohort.clients=[a].",
    "train algorithm.tolerance={a:1}": "algorithm.tolerance must be a number, not {'a': 1}.",
    "train seed=${seed}": "seed cannot be resolved: Recursive interpolation detected.",
    "train =1": "'=1' is no override; write key=value.",
    "train rounds": "'rounds' is no override; write key=value.",
    "train --resolve": "--resolve has a meaning with --cfg alone; write --cfg job --resolve.",
    "train folder=null": "folder must be the path of a folder, not None.",
    "train hydra.run.dir=": "hydra.run.dir names no folder; write hydra.run.dir=FOLDER.",
    "train hydra.run.dir=''": "hydra.run.dir names no folder; write hydra.run.dir=FOLDER.",
    "train algorithm.strength=-1": "algorithm.strength must not be negative, not -1",
    "train algorithm=ditto algorithm.strength=-1": "strength",
    "train algorithm=fedpd cohort.fraction=0.5": "FedPD needs all clients in every round",
    "report here": "no finished run",
    "report here other": "runs=other is no folder; name one that holds finished runs.",
    "evaluate here": "(it has no config.yaml); name one that a run has printed.",
    "audit here": "(it has no config.yaml); name one that a run has printed.",
    "audit run=here shadow=4": "Unknown key 'shadow' (did you mean shadows?)",
}
TABLE = "train data=breast_cancer model=mlp partition=round_robin algorithm=fedavg"
HOSTILE |= {
    "train experiment=digits_pfednet tuned.sgd=0.1": "tuned.sgd=0.1 stands where keys such as "
    "tuned.sgd.lr belong; set these.",
    f"{TABLE} tuned.sgd=0.1": "Unknown key 'tuned.sgd'; tuned has no keys.",
    f"{TABLE} tuned=3": "tuned=3 would replace a whole section; set one of its keys.",
    f"{TABLE} privacy=true": "privacy=True would replace a whole section; set one of its keys.",
    f"{TABLE} pictures=png": "pictures=png would replace a whole section; set one of its keys.",
    "train experiment=../suites/heart": "names no option; choose one by experiment=NAME.",
    f"{TABLE} algorithm=../algorithm/fedavg": "names no option; choose one by algorithm=NAME.",
    f"{TABLE} -m algorithm=fedavg,/tmp/x": "names no option; choose one by algorithm=NAME.",
    f"{TABLE} codec.up=./stc": "codec.up=./stc would replace a whole section; choose an",
    f"{TABLE} +codec@codec.sideways=stc": "Unknown key 'codec.sideways'; codec has up, down.",
    f"{TABLE} hydra.run.dir=null": "hydra.run.dir names no folder; write hydra.run.dir=FOLDER.",
    f"{TABLE} -m seed=0,1 hydra.sweep.dir=null": "hydra.sweep.dir names no folder; write",
    f"{TABLE} -m hydra.sweeper.params.seed=0,1": "hydra.sweeper.params.seed is for Hydra's own use",
    f"{TABLE} name={'x' * 300}": "has a name of 300 bytes in a path of",
    f"{TABLE} cohort.absent=3": "cohort.absent must be a list, not 3; write [3].",
    f"{TABLE} cohort.absent=1e400": "cohort.absent must be a list, not inf; write [inf].",
    f"{TABLE} hydra.run.dir={'x/' * 2000}": "names 200",
    f"{TABLE} data.path=": "data.path names no file or folder; write data.path=PATH, or leave it",
    "report runs=here out=": "out names no file or folder; write out=PATH, or leave it out.",
    "benchmark suite=digits out=": "out names no file or folder; write out=PATH",
    "advise data=breast_cancer out=": "out names no file or folder; write out=PATH",
    f"{TABLE} rounds=3 cohort.absent=[[3,[a]]]": "cohort.absent names round 3, but the last of ",
    f"{TABLE} cohort.clients=[a,a]": "cohort.clients names 'a' twice; name each client once.",
    f"{TABLE} cohort.absent=[[0,[a,a]]]": "cohort.absent, round 0, names 'a' twice; name each",
    **{
        f"{TABLE} init.{key}": f"init.{key.partition('=')[0]} changes nothing without init.weights"
        for key in ("part=shared", "spread=0.2", "rename={a:b}", "client=a", "strict=true")
    },
    "benchmark suite=digits methods=[]": "methods must be a list with at least one entry, not []",
    "benchmark suite=[]": "suite must be a list with at least one entry, not [].",
    "benchmark suite=digits figures=maybe": "figures must be true or false, not 'maybe'.",
    "look of=[]": "of must be a list with at least one entry, not [].",
    f"{TABLE} augment=nnunet": "augment changes nothing with data=breast_cancer, which takes no",
    f"{TABLE} augment.noise=0.2": "augment.noise changes nothing with data=breast_cancer, which",
    "export run=here client=[]": "client must be a list with at least one entry, not [].",
    "predict bundle=[] input=here output=x": "bundle must be a list with at least one entry, not",
    "evaluate run=here subsets=[]": "subsets must be a list with at least one entry, not",
    "evaluate run=here split=tests": "split='tests' is unknown (did you mean test?); choose one of",
    f"{TABLE} in_channels=many": "in_channels must be a whole number or null, not 'many'.",
    f"{TABLE} spatial_dims=two": "spatial_dims must be a whole number or null, not 'two'.",
    f"{TABLE} exclusive=maybe": "exclusive must be true or false or null, not 'maybe'.",
    f"{TABLE} regions=a": "regions must be a list or null, not 'a'; write regions=[a].",
    f"{TABLE} model.selection=[]": "model.selection must be a list with at least one entry, not []",
    "deploy sites=[a] dry_run=x port=x": "port must be a whole number, not 'x'.",
    "deploy sites=[a] dry_run=x terms.quorum=x": "terms.quorum must be a number, not 'x'.",
    "look data=breast_cancer least=-1": "least must be a whole number of at least 0, not -1.",
}
# Of a run that is there.
OF_A_RUN = {
    "k=1": "k changes nothing without onboard; set onboard, too.",
    "onboard=a k=-1": "k must be a whole number of at least 1, not -1.",
    "onboard=a k=[a]": "k[0] must be a whole number, not 'a'.",
    "onboard=a onboard_steps=0": "onboard_steps must be a whole number of at least 1, not 0.",
    "across=maybe": "across must be true or false, not 'maybe'.",
    "bands=[40]": "bands changes nothing without by; set by, too.",
    "bands=40,50": "bands changes nothing without by; set by, too.",
    "least=5": "least changes nothing without by; set by, too.",
    "by=age bands=[b]": "bands[0] must be a number, not 'b'.",
    "by=age least=-1": "least must be a whole number of at least 0, not -1.",
}
# What an algorithm's class checks needs torch, and nothing else of this size; others are above.
LATER = {
    "train local.steps=many": "local.steps must be a whole number or null, not 'many'",
    "train cohort.fraction=2": "cohort.fraction must be in",
    "train -m seed=0,1 algorithm=fedprox algorithm.mu=-1": "mu",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Gives status, what went to stderr, and the libraries that a command has loaded."""
    script = tmp_path_factory.mktemp("script") / "tell.py"
    script.write_text(TELL)
    # What a refused command loads, which is nothing of what it may not.
    light = processes.Forks("medfed.commands.main", "medfed.config.compose", "hydra")

    def tell(line: str, folder: Path, forks: processes.Forks = light) -> tuple[int, str, list[str]]:
        done = forks.run(script, *line.split(), cwd=folder)
        *_, last = done.stdout.splitlines()
        return done.returncode, done.stderr, last.split()[1:]

    yield tell
    light.end()


@pytest.mark.parametrize(("line", "sentence"), EARLY.items())
def test_a_mistake_is_one_sentence_before_anything_is_loaded(line, sentence, told, tmp_path):
    status, error, loaded = told(line, tmp_path)
    assert status in (1, 2)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert loaded == []
    assert not list(tmp_path.iterdir())


def test_hostile_lines_are_one_sentence_and_leave_nothing(capsys, tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for line, sentence in HOSTILE.items():
        with subtests.test(line):
            with pytest.raises(SystemExit) as ended:
                main(line.split())
            error = capsys.readouterr().err
            assert ended.value.code == 1
            assert error.startswith("error: ")
            assert error.count("\n") == 1
            assert sentence in error
            assert [p.name for p in tmp_path.rglob("*")] == ["here"]


@pytest.mark.parametrize(("words", "sentence"), OF_A_RUN.items())
def test_what_an_evaluation_would_ignore_is_refused(words, sentence, capsys, tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(SystemExit):
        main(["evaluate", f"run={tmp_path}", *words.split()])
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed_before_anything_is_loaded(told, tmp_path):
    status, error, loaded = told("train experiment=digits_pfednet trainer=gpu", tmp_path)
    assert (status, loaded) == (1, [])
    assert error.startswith("error: trainer.accelerator=gpu finds no GPU on this machine; choose")


@pytest.mark.parametrize(("line", "sentence"), LATER.items())
def test_a_value_that_a_class_refuses_needs_torch_alone(line, sentence, told, tmp_path):
    status, error, loaded = told(line, tmp_path, processes.with_torch())
    assert status == 1
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert set(loaded) <= {"torch"}
    assert not list(tmp_path.iterdir())


def lines_of(capsys, *arguments: str) -> list[str]:
    main(arguments)
    return capsys.readouterr().out.splitlines()


def test_the_overview_fits_a_screen_and_names_every_command(capsys):
    lines = lines_of(capsys, "--help")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert all(any(line.split()[:1] == [name] for line in lines) for name in COMMANDS)
    assert lines_of(capsys) == lines


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_its_own_keys_first(name, capsys):
    lines = lines_of(capsys, name, "--help")
    text = "\n".join(lines)
    assert f"medfed {name}" in lines[0] + lines[1]
    own = {
        "train": "experiment",
        "prepare": "data",
        "report": "runs",
        "benchmark": "suite",
        "advise": "methods",
        "predict": "bundle",
        "study": "plan",
        "adopt": "bundle",
    }
    assert own.get(name, "run") in text
    assert "hydra" not in "\n".join(lines[:20])
    # The whole configuration is shown on request only.
    assert "_target_" not in text
    assert "--cfg job" in text


@pytest.mark.parametrize("resolve", [False, True], ids=["written", "resolved"])
def test_the_configuration_that_is_printed_is_the_one_that_runs(resolve, capsys, tmp_path):
    """With what an experiment sets for a method, and for data that are not its own."""
    words = ["experiment=heart_flamby", "algorithm=local", f"data.path={tmp_path}"]
    main(["train", *words, "folder=here", "--cfg", "job", *["--resolve"] * resolve])
    printed = yaml.safe_load(capsys.readouterr().out)
    runs = described([*words, "folder=here"])
    assert runs.local.epochs == 50
    assert printed == (runs.values.plain() if resolve else runs.source)


def test_the_list_of_methods_and_one_in_full(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    table = "\n".join(lines_of(capsys, "methods"))
    assert all(name in table for name in yamls())
    page = "\n".join(lines_of(capsys, "methods", "apfl"))
    assert "Deng, Kamani, Mahdavi" in page
    assert "algorithm.alpha=0.5" in page
    folder = write_files(DOCS / "extending" / "algorithm.md", tmp_path)
    (own,) = (p.stem for p in folder.glob("configs/algorithm/*.yaml"))
    assert f"algorithm={own}" in "\n".join(lines_of(capsys, "methods", own, f"plugins={folder}"))
    assert "medfed methods [NAME or NEED]" in "\n".join(lines_of(capsys, "methods", "--help"))


@pytest.mark.parametrize(
    ("words", "found"),
    {
        "mr-mtl": ["algorithm=l2gd (second model)", "algorithm=mixture_admm (second model)"],
        "LG-FedAvg": ["algorithm=lgfedavg (personal part)"],
        "silobn": ["algorithm=silobn (personal part)"],
        "fenda": ["algorithm=fenda (personal part)"],
        "recalibrated": ["algorithm=recalibrated (personal part)"],
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_method_is_found_by_either_name(words, found, capsys):
    lines = lines_of(capsys, "methods", words)
    assert [s for s in lines if s.startswith("algorithm=") and s.endswith(")")] == found


def test_methods_are_listed_by_what_hospitals_have(capsys):
    listed = "\n".join(lines_of(capsys, "methods", "unequal_networks"))
    assert all(f"  {name} " in listed for name in ("fedmd", "heterofl", "quped"))
    assert "  fedavg " not in listed


def test_the_version_is_told(capsys):
    assert lines_of(capsys, "--version") == [__version__]
