"""Whether two trees give the same results: every experiment, every command.

    python benchmarks/project/same_results.py --out before.json --keep before --tree OLD_CLONE
    python benchmarks/project/same_results.py --against before.json --keep after
    diff -r before after      # what a difference consists of

Every experiment, method and codec trains two rounds of two steps on small generated data; every
command runs on what they leave. Each file that a command writes, its output and its errors become a
text without times, versions, absolute paths and names of modules, which is hashed. Tensors and
pixels are hashed as such. Two trees are compared on one machine, in one environment. It takes some
minutes.

Left out, because they cost too much or need more than one process: sweeps (-m), several ranks,
`medfed deploy` beyond its dry run, DICOM, ONNX but for one network, loggers, GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

# Imports the libraries once and forks for each command: as tests/processes.py, but in any tree.
LIBRARIES = ("matplotlib.backends.backend_agg", "monai", "pytorch_lightning", "torch._dynamo")
FEW_STEPS = 3  # import what they need by themselves
WORKER = """
import importlib, json, os, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in ((1, "stdout"), (2, "stderr")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(f"{task['folder']}/{name}.txt", flags), number)
        os.chdir(task["cwd"])
        status = 0
        try:
            from medfed.commands.main import main
            main(task["arguments"])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
SHORT = ("rounds=2", "local.steps=2", "evaluation.every=1", "logger=none", "progress=false")
PLAIN = (*SHORT, "pictures.format=none")
FEW = ("data.root=cohorts", "data.generated.hospitals=2", "data.generated.patients=4")
PATCHES = ("data.patch_size=[16,16]", "data.patches_per_patient=4", "data.batch_size=4")
UNET = ("model.network.channels=[4,8]", "model.network.strides=[2]")
PARTS = ("data.val_fraction=0.25", "data.test_fraction=0.25")
SCANS = (*FEW, *PATCHES, *PARTS, "data.generated.shape=[32,32,8]")
HEADS = (*SCANS, *UNET)
OTHERS = (*SCANS, "data.generated.seed=5")
NODULES = (
    *("data.root=cohorts", "data.generated.hospitals=2", "data.generated.patients=6"),
    *("data.generated.shape=[48,48,24]", "data.generated.lookalikes=8"),
    "data.patches.size=[16,16]",
)
ORGANS = (*FEW, *PATCHES, *UNET, "data.generated.shape=[28,24,12]", "data.val_fraction=0.25")
EYES = (*PATCHES, *UNET, "data.path=eyes", "data.root=cohorts")
CNN = ("model.network.channels=[4,4,4]",)
TABLE = ("data=csv", "data.label=ill", "data.centre=hospital", "data.patient=patient")
MIXTURE = ("data.clients=6", "data.samples=40")
CLINICAL = ("experiment=clinical_pfednet", *PLAIN)
# What is made small of an experiment, by how its name begins; the first that fits counts.
SMALL: dict[str, tuple[str, ...]] = {
    "brats_ppfl": (*HEADS, "data.generated.patients=6"),
    "brats": HEADS,
    "cer_stc_brats": HEADS,
    "cer_stc": (*NODULES, "model.network.block_config=[1,1]"),
    "digits": CNN,
    "finetune_bundle": (*OTHERS, "init.weights=brats_bundles/hospital_0"),
    "heart": ("data.path=heart",),
    "luna16_detection": (
        *(*FEW, *PARTS, "data.generated.shape=[64,64,24]", "data.batch_size=4"),
        *("data.patches_per_patient=4", "model.network.channels=[4,8]"),
    ),
    "luna16": (*NODULES, "model.network.block_config=[1,1]"),
    "medmnist": ("data.root=cohorts", "data.generated.images=[60,30,30]"),
    "nnunet": (
        *("data.root=cohorts", "data.generated.hospitals=2", "data.generated.patients=4"),
        *("data.generated.shape=[44,40,12]", "data.val_fraction=0.25", "data.test_fraction=0.25"),
        *("data.planning.memory_gb=0.02", "data.planning.features=4"),
    ),
    "organs": (*ORGANS, "data.spacing=[9.0,9.0]"),
    "qupel_brats": HEADS,
    "qupel_digits": CNN,
    "qupel_luna16": NODULES,
    "retina": (*EYES, "partition.parts={drive:2,chase:1}"),
    "synthetic": MIXTURE,
}
NEEDS = {"finetune_bundle": ("export brats",)}
SUITE = """
title: Two hospitals
experiment: clinical_pfednet
overrides: ["model.selection=[auroc,max]", partition.num_clients=2]
lr: [0.01, 1.0]
splits: folds
dial: δ
variants:
  one: {dial: 1, overrides: [partition.delta=1]}
  four: {dial: 4, overrides: [partition.delta=4]}
sizes:
  smoke: {splits: 2, trials: 2, overrides: [rounds=1, local.steps=2]}
  small: {splits: 2, trials: 2, overrides: [rounds=1, local.steps=2]}
  full: {splits: 2, trials: 2, overrides: [rounds=1, local.steps=2]}
"""
MISTAKES = (
    *("train roundz=3", "train algorithm=fedavgg", "train local.steps=many"),
    *("train data.path=/no/such", "train plugins=/no/such", "train --multrun seed=0,1"),
    *("train algorithm.strength=-1", "train cohort.fraction=2", "evaluate run=/no/such"),
    *("train algorithm=fedpd cohort.fraction=0.5", "evaluate roun=x", "compare runs=/no/such"),
    *("report runs=/no/such", "benchmark suite=digitz", "benchmark suite=digits size=medium"),
    *("benchmark suite=digits shard=5/4", "advise methods=dito", "advise algorithm=ditto"),
    *("advise folds=1", "export run=/no/such", "predict bundle=/no/such input=x output=y"),
    *("methods fedavgg", "doctor now", "tarin", "deploy sites=[a,b]", "site chek"),
    *("export run=clinical/pfednet client=nobody", "evaluate run=clinical/pfednet split=all"),
    *("train data=csv data.path=clinics.csv", "train data._target_=os.system", "site check"),
)
# Values of these keys and columns are of the clock or of the installation.
UNSTABLE = re.compile(
    "second|time|date|created|commit|version|hostname|platform|cpu_hours|python|duration|rate$"
)
UNSTABLE_FILES = (".lock", ".pid", "onboarding.png")  # who holds a folder; a picture of times
_TIME = r"\d{4}-\d\d-\d\d[T_ ]\d\d[-:]\d\d([-:]\d\d)?([.,]\d+)?([+-]\d\d:\d\d|Z)?"
_SPENT = r"\b\d+([.,]\d+)? ?(s|ms|seconds|minutes|items/s|CPU seconds)(?![\w/])"
# Digests of files that hold a time or a module's name; the files are compared themselves.
_DIGEST = r"((config\.yaml|metadata\.json|card\.md|files|said|key)\W+(SHA-256: )?)[0-9a-f]{64}"
REPLACED = (
    (re.compile(r"\bmedfed(\.[a-z_0-9]+)+\.?"), "medfed…"),
    (re.compile(r"\bmedfed(/[\w]+)+\.py"), "medfed…py"),
    (re.compile(_TIME), "TIME"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(_SPENT), "SECONDS"),
    (re.compile(r"\b\d\.\d{3}(?= │ +[\d.]+ [kMG]?B │)"), "SECONDS"),  # of onboarding's table
    (re.compile(r"\b\d+(\.\d+)? [kMG]?B/s"), "RATE"),
    (re.compile(r"\b\d+(\.\d+)? (steps per second|[kMG]?B free)"), "FREE"),
    (re.compile(r"(prepared|computed) \d+/\d+ .* left\n"), ""),  # how often: as quick as it is
    (re.compile(_DIGEST), r"\1DIGEST"),
    (re.compile(r"(?<=volumes_)[0-9a-f]{12}\b"), "KEY"),  # of files and when they were written
    (re.compile(r"(?<=-)[0-9a-f]{16}\b"), "KEY"),  # of a cell: of its options
    (re.compile(r"\b(commit|git|Git)( ?[:=]? ?)[0-9a-f]{7,40}\b"), r"\1\2COMMIT"),
)


class Step(NamedTuple):
    """One command."""

    name: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...] = ()  # folders and files
    needs: tuple[str, ...] = ()  # steps before it


def steps(tree: Path) -> list[Step]:
    """Returns all commands, in an order in which each finds what it needs."""
    runs = [
        Step("train brats", ("train", "experiment=brats_pfednet", *SHORT, *HEADS, "folder=brats"),
             ("brats",)),
        Step("export brats", ("export", "run=brats", "out=brats_bundles", "onnx=true"),
             ("brats_bundles",), ("train brats",)),
    ]  # fmt: skip
    for path in sorted((tree / "configs/experiment").glob("*.yaml")):
        own = next((keys for start, keys in SMALL.items() if path.stem.startswith(start)), ())
        folder = f"experiments/{path.stem}"
        keys = ("train", f"experiment={path.stem}", *PLAIN, *own, f"folder={folder}")
        runs.append(Step(f"experiment {path.stem}", keys, (folder,), NEEDS.get(path.stem, ())))
    for kind, group in (("algorithm", "methods"), ("codec", "codecs")):
        for path in sorted((tree / f"configs/{kind}").glob("*.yaml")):
            folder = f"{group}/{path.stem}"
            chosen = [f"codec.up={path.stem}", f"codec.down={path.stem}"]
            chosen = chosen if kind == "codec" else [f"algorithm={path.stem}", "model=mlp"]
            keys = ("train", *CLINICAL, *chosen, f"folder={folder}")
            runs.append(Step(f"{kind} {path.stem}", keys, (folder,)))
    return [*runs, *commands(), *words()]


def commands() -> list[Step]:
    """Returns what else may be done with data and runs."""
    trained = [
        Step(f"train {name}", ("train", *CLINICAL[:1], *SHORT, *keys, f"folder=clinical/{name}"),
             (f"clinical/{name}",))
        for name, keys in {
            "pfednet": (), "fedavg": ("algorithm=fedavg",), "local": ("algorithm=local",),
            "pfednet_1": ("seed=1",), "fedavg_1": ("algorithm=fedavg", "seed=1"),
            "local_1": ("algorithm=local", "seed=1"),
        }.items()
    ]  # fmt: skip
    three = tuple(step.name for step in trained)
    trained += [
        Step(f"train path {n}", ("train", *CLINICAL, f"algorithm.strength={strength}",
                                 f"folder=path/{n}"), (f"path/{n}",))
        for n, strength in enumerate((0.0, 0.01))
    ]  # fmt: skip
    alone = ("train", "experiment=brats_pfednet", *PLAIN, *HEADS, "algorithm=local")
    trained.append(Step("train brats alone", (*alone, "folder=brats_alone"), ("brats_alone",)))
    late = ("train", *CLINICAL, "keep_out=[hospital_0,hospital_4]", "folder=late")
    asked = ("advise", *CLINICAL, "methods=[fedavg,ditto]", "folds=2", "repeats=1", "workers=1")
    agreed = ("deploy", "dry_run=dry", "sites=[Basel,Bern,Chur]", *CLINICAL, *TABLE)
    hospital = ("agreed=dry/agreed.json", "local=site.yaml")
    quantised, mixed = "run=experiments/qupel_digits", "run=experiments/digits_ppfl"
    scan = "input=SCAN"
    return [
        *trained,
        Step("prepare clinical", ("prepare", *CLINICAL, "show=true", "folder=prepared/clinical"),
             ("prepared/clinical",)),
        Step("prepare brats", ("prepare", "data=brats", *SCANS, "workers=1", "show=true",
                               "folder=prepared/brats"), ("prepared/brats",)),
        Step("prepare luna16", ("prepare", "data=luna16", *NODULES, "workers=1", "show=true",
                                "folder=prepared/luna16"), ("prepared/luna16",)),
        Step("train pooled table", ("train", *CLINICAL, *TABLE, "data.path=clinics.csv",
                                    "data.scaling=pooled", "folder=table"), ("table",)),
        Step("train late", late, ("late",)),
        Step("resume", ("train", *CLINICAL, "algorithm=scaffold", "model=mlp",
                        "resume=methods/scaffold"), ("methods/scaffold",), ("algorithm scaffold",)),
        Step("evaluate", ("evaluate", "run=clinical/pfednet", "split=val"), ("clinical/pfednet",),
             three),
        Step("evaluate subsets", ("evaluate", "run=brats", "subsets=all"), ("brats",),
             ("train brats",)),
        Step("onboard", ("evaluate", "run=late", "onboard=all", "k=[1,5]", "onboard_steps=4"),
             ("late",), ("train late",)),
        Step("report bits", ("report", "runs=codecs", "out=reported_codecs"),
             ("reported_codecs",), ("codec fp32", "codec qsgd", "codec stc")),
        Step("report path", ("report", "runs=path", "out=reported_path"), ("reported_path",),
             ("train path 0", "train path 1")),
        Step("report", ("report", "runs=clinical", "out=reported"), ("reported",), three),
        Step("report brats", ("report", "runs=[brats,brats_alone]", "out=reported_brats"),
             ("reported_brats",), ("train brats", "train brats alone")),
        Step("export clinical", ("export", "run=clinical/pfednet"), ("clinical/pfednet/bundles",),
             three),
        Step("export bits", ("export", "run=brats", "bits=[32,3]", "client=hospital_1",
                             "finetune_steps=2", "out=few_bits"), ("few_bits",), ("train brats",)),
        Step("export quantised", ("export", quantised, "client=hospital_0", "out=quantised"),
             ("quantised",), ("experiment qupel_digits",)),
        Step("export mixture", ("export", mixed, "client=group_0_hospital_0", "out=mixture"),
             ("mixture",), ("experiment digits_ppfl",)),
        Step("predict scan", ("predict", "bundle=brats_bundles/hospital_0", scan, "output=scan",
                              "backend=torch", "probabilities=true"), ("scan",), ("export brats",)),
        Step("predict onnx", ("predict", "bundle=brats_bundles/hospital_0", scan, "output=onnx",
                              "backend=onnx"), ("onnx",), ("export brats",)),
        Step("predict folder", ("predict", "bundle=brats_bundles/hospital_0", scan, "output=both",
                                "picture=true"), ("both",), ("export brats",)),
        Step("predict table", ("predict", "bundle=clinical/pfednet/bundles/hospital_0",
                               "input=patients.csv", "output=risks.csv"), ("risks.csv",),
             ("export clinical",)),
        Step("advise", (*asked, "out=advised"), ("advised",)),
        Step("benchmark", ("benchmark", "suite=two", "methods=[ditto]", "size=smoke", "workers=1",
                           "plugins=plugins", "out=measured"), ("measured",)),
        Step("deploy", agreed, ("dry",)),
        Step("site check", ("site", "check", *hospital), (), ("deploy",)),
    ]  # fmt: skip


def words() -> list[Step]:
    """Returns what only speaks: help, tables, and sentences on mistakes."""
    named = "train prepare evaluate compare report benchmark advise export predict deploy site"
    named += " methods doctor"
    helps = [Step(f"help {name}", (name, "--help")) for name in named.split()]
    tables = [("methods",), ("methods", "apfl"), ("doctor",)]
    shown = [("train", "experiment=brats_pfednet", "folder=x", "--cfg", "job"), ("--help",)]
    return [
        *helps,
        *(Step(" ".join(a), a) for a in (*tables, *shown)),
        *(Step(f"mistake {line}", tuple(line.split())) for line in MISTAKES),
    ]


def write_inputs(work: Path) -> None:
    """Writes what only a user has: tables, photographs, a suite and a hospital's file."""
    rng = np.random.default_rng(0)
    (work / "heart").mkdir()
    for centre in ("cleveland", "hungarian", "switzerland", "va"):
        cells = rng.integers(1, 4, (30, 13))
        lines = [",".join(map(str, [*row, n % 2])) for n, row in enumerate(cells)]
        (work / f"heart/processed.{centre}.data").write_text("\n".join(lines) + "\n")
    rows = [["image", "mask", "patient", "centre"]]
    for centre, patients in (("drive", 9), ("chase", 6)):
        (work / "eyes" / centre).mkdir(parents=True)
        for n in range(patients):
            mask: npt.NDArray[np.bool_] = np.zeros((72, 72), bool)
            mask[np.add.outer(np.arange(72), n * np.arange(72)) % 17 < 3] = True
            image = np.clip(rng.normal(150, 6, (72, 72, 3)) - 70 * mask[..., None], 0, 255)
            Image.fromarray(image.astype(np.uint8)).save(work / f"eyes/{centre}/{n}.png")
            for name in (f"{n}_mask", f"{n}_mask_second_reader"):
                Image.fromarray(mask).save(work / f"eyes/{centre}/{name}.png")
            rows.append([f"{centre}/{n}.png", f"{centre}/{n}_mask.png", f"{centre}{n}", centre])
    _write_csv(work / "eyes/images.csv", rows)
    clinics: list[list[Any]] = [["patient", "hospital", "age", "sex", "crp", "ill"]]
    for n in range(90):
        crp = round(rng.lognormal(), 2) if n % 7 else ""
        measured = [round(rng.normal(60, 9), 1), "fm"[rng.integers(2)], crp, rng.integers(2)]
        clinics.append([f"P{n:03d}", ("Basel", "Bern", "Chur")[n % 3], *measured])
    _write_csv(work / "clinics.csv", clinics)
    _write_csv(work / "bern.csv", [row for row in clinics if row[1] in ("hospital", "Bern")])
    (work / "site.yaml").write_text("site: Bern\ndata:\n  path: bern.csv\n")
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    names = [str(name) for name in table.feature_names]
    _write_csv(work / "patients.csv", [names, *table.data[:20].tolist()])
    (work / "plugins/configs/suites").mkdir(parents=True)
    (work / "plugins/configs/suites/two.yaml").write_text(SUITE)


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def chosen(every: list[Step], only: str | None) -> list[Step]:
    """Returns the steps whose names fit a pattern, and those that they need."""
    by_name = {step.name: step for step in every}
    wanted = {name for name in by_name if only is None or re.search(only, name)}
    for step in reversed(every):
        if step.name in wanted:
            wanted.update(step.needs)
    missing = wanted - by_name.keys()
    if missing:
        raise SystemExit(f"Unknown steps {sorted(missing)}.")
    return [step for step in every if step.name in wanted]


def perform(every: list[Step], tree: Path, work: Path) -> Iterator[tuple[str, str]]:
    """Runs commands one after the other; yields what each leaves as texts with names."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    env |= {"MPLBACKEND": "Agg", "SOURCE_DATE_EPOCH": "0", "TERM": "dumb", "TMPDIR": str(work)}
    libraries = LIBRARIES if len(every) > FEW_STEPS else ()
    command = [sys.executable, "-c", WORKER, *libraries]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, cwd=work, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for step in every:
            seen = {p: p.stat().st_mtime_ns for p in _files(work, step)}
            spoken = work.parent / "spoken"
            spoken.mkdir(exist_ok=True)
            arguments = [_scan(work) if a == "input=SCAN" else a for a in step.arguments]
            task = {"folder": str(spoken), "cwd": str(work), "arguments": arguments}
            print(json.dumps(task), file=worker.stdin, flush=True)
            status = worker.stdout.readline().strip()
            places = {str(work): "WORK", str(tree): "TREE", str(Path.home()): "HOME"}
            yield f"{step.name}/status", status
            for name in ("stdout", "stderr"):
                text = (spoken / f"{name}.txt").read_text("utf-8")
                yield f"{step.name}/{name}", plain(text, places)
            for path in _files(work, step):
                if seen.get(path) != path.stat().st_mtime_ns:
                    name = plain(path.relative_to(work).as_posix(), places)
                    yield f"{step.name}/{name}", read(path, places)
        worker.stdin.close()


def _files(work: Path, step: Step) -> list[Path]:
    places = [work / name for name in step.writes]
    inside = [p for place in places for p in (place, *place.rglob("*")) if p.is_file()]
    return sorted(p for p in inside if not p.name.endswith(UNSTABLE_FILES))


def _scan(work: Path) -> str:
    """The first scan of the generated cohort."""
    scans = sorted(p for p in (work / "cohorts").rglob("imagesTr/*.nii.gz"))
    return f"input={scans[0].relative_to(work)}" if scans else "input=nothing"


def plain(text: str, places: dict[str, str]) -> str:
    """Returns a text without what differs from run to run."""
    for place, name in places.items():
        text = text.replace(place, name)
    for pattern, name in REPLACED:
        text = pattern.sub(name, text)
    return text


def read(path: Path, places: dict[str, str]) -> str:
    """Returns what a file says as a text that equal results share."""
    kind = path.suffix
    if kind == ".json":
        with contextlib.suppress(json.JSONDecodeError):
            content = _stable(json.loads(path.read_text("utf-8")))
            return plain(json.dumps(content, indent=1, ensure_ascii=False), places)
    if kind == ".csv":
        rows = list(csv.reader(io.StringIO(path.read_text("utf-8"))))
        kept = [not UNSTABLE.search(name) for name in rows[0]] if rows else []
        lines = [",".join(c for c, k in zip(row, kept, strict=False) if k) for row in rows]
        return plain("\n".join(lines), places)
    if kind == ".safetensors":
        return _safetensors(path.read_bytes())
    if kind in (".pt", ".ckpt", ".pth"):
        return _checkpoint(path, places)
    if kind == ".onnx":
        return _onnx(path)
    if kind in (".png", ".jpg"):
        with Image.open(path) as image:
            return f"{image.mode} {image.size} {_hash(image.tobytes())}"
    if kind == ".gz":
        return _hash(gzip.decompress(path.read_bytes()))
    if kind in (".zip", ".npz"):
        with zipfile.ZipFile(path) as file:
            return "\n".join(f"{n} {_hash(file.read(n))}" for n in sorted(file.namelist()))
    raw = path.read_bytes()
    try:
        return plain(raw.decode("utf-8"), places)
    except UnicodeDecodeError:
        return _hash(raw)


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "*" if UNSTABLE.search(k) else _stable(v) for k, v in value.items()}
    return [_stable(v) for v in value] if isinstance(value, list) else value


def _safetensors(raw: bytes) -> str:
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    lines = []
    for name, one in sorted(header.items()):
        if name != "__metadata__":
            start, end = one["data_offsets"]
            lines.append(f"{name} {one['dtype']} {one['shape']} {_hash(body[start:end])}")
    return "\n".join(lines)


def _checkpoint(path: Path, places: dict[str, str]) -> str:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is no plain checkpoint is told by its kind
        return f"not loadable: {type(error).__name__}"
    return plain("\n".join(_flat(content, "")), places)


def _flat(value: Any, name: str) -> Iterator[str]:
    import torch

    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        yield f"{name} {value.dtype} {tuple(value.shape)} {_hash(raw)}"
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _flat("*" if UNSTABLE.search(str(key)) else value[key], f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for n, one in enumerate(value):
            yield from _flat(one, f"{name}/{n}")
    else:
        yield f"{name} {value!r}"


def _onnx(path: Path) -> str:
    import onnx

    graph = onnx.load(path).graph
    lines = [f"{node.op_type} {len(node.input)} {len(node.output)}" for node in graph.node]
    tensors = sorted(_hash(onnx.numpy_helper.to_array(t).tobytes()) for t in graph.initializer)
    return "\n".join([*lines, *tensors])


def compare(now: dict[str, str], before: dict[str, str], only: str | None) -> list[str]:
    """Returns a line for each name that is not the same in both."""
    ran = {name.partition("/")[0] for name in now}
    lines = []
    for name in sorted({*now, *before}):
        if only is not None and name.partition("/")[0] not in ran:
            continue
        if now.get(name) != before.get(name):
            kind = "new" if name not in before else "gone" if name not in now else "differs"
            lines.append(f"{kind:<8} {name}")
    return lines


def main() -> None:
    """Takes the hashes of a tree, and compares them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--out", type=Path, help="JSON file of the hashes")
    parser.add_argument("--against", type=Path, help="JSON file of another tree's hashes")
    parser.add_argument("--keep", type=Path, help="folder for the texts that are hashed")
    parser.add_argument("--only", help="steps whose names fit this pattern, and what they need")
    options = parser.parse_args()
    tree = options.tree.resolve()
    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve() / "work"
        work.mkdir()
        write_inputs(work)
        for name, text in perform(chosen(steps(tree), options.only), tree, work):
            hashes[name] = _hash(text.encode())
            if name.endswith("/status"):
                print(f"{text:>3} {name.removesuffix('/status')}", flush=True)
            if options.keep:
                kept = options.keep / name.replace(" ", "_")
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(text + "\n", encoding="utf-8")
    print(f"{len(hashes)} hashes")
    if options.out:
        options.out.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    if options.against:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        lines = compare(hashes, before, options.only)
        print("\n".join([*lines, f"{len(lines)} differences"]))
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
