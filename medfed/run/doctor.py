"""What a machine has, which optional packages are there, and what is wrong with the set-up."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from packaging.requirements import Requirement

from medfed.common.compiling import NOT_KEPT, can_cache
from medfed.common.console import size
from medfed.config.compose import described

EXTRAS = {
    "zstd": "final lossless compression of messages (channel.up.zstd)",
    "onnx": "exporting models as ONNX and predicting with them",
    "bundle": "running exported bundles with MONAI's command line",
    "networks": "MONAI's transformers, such as model=swin_unetr",
    "resenc": "nnU-Net's residual encoders (data.planning.residual=M)",
    "dicom": "predictions as DICOM SEG",
    "wandb": "logger=wandb",
    "tensorboard": "logger=tensorboard",
    "mlflow": "logger=mlflow",
    "sites": "runs across hospitals with NVIDIA FLARE (medfed deploy)",
}


Row = tuple[str, str]
"""A subject, and what the report says about it."""


def machine(folder: Path) -> list[Row]:
    """Returns what the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [
        ("system", f"{platform.platform(terse=True)}, Python {platform.python_version()}"),
        ("CPU", f"{cores} cores of {os.cpu_count()}, {', '.join(units())}"),
        ("memory", memory()),
        ("disk", f"{size(shutil.disk_usage(folder).free)} free in {folder}"),
        ("PyTorch", f"{torch.__version__}, built for {torch.version.cuda or 'CPUs only'}"),
    ]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        text = f"{gpu.name}, {size(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        rows.append((f"GPU {index}", f"{text}, driver {driver() or 'unknown'}"))
    return rows if torch.cuda.device_count() else [*rows, ("GPU", "none that PyTorch can use")]


def units() -> list[str]:
    """Returns the vector units that PyTorch finds, such as AVX512 and bf16."""
    tests = {"bf16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}
    known = [name for name, test in tests.items() if getattr(torch.cpu, test, lambda: False)()]
    return [torch.backends.cpu.get_cpu_capability(), *known]


def memory() -> str:
    """Returns how much memory there is and, if the system says so, how much of it is free."""
    if not hasattr(os, "sysconf"):
        return "unknown"
    whole = size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    file = Path("/proc/meminfo")
    if not file.is_file():
        return whole
    kilobytes = {line.split(":")[0]: line.split()[1] for line in file.read_text().splitlines()}
    return f"{whole}, {size(1024 * int(kilobytes['MemAvailable']))} free"


def driver() -> str | None:
    """Returns the version of NVIDIA's driver; ``None`` without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0] if done.stdout.split() else None


def extras() -> list[Row]:
    """Returns which optional packages are there, and what they are for."""
    # The metadata of an older installation may list fewer packages than the code.
    absent = "not installed (pip install '.[{}]' in a clone)"
    known = importlib.metadata.metadata("medfed").get_all("Provides-Extra") or ()
    return [
        (f"medfed[{extra}]", f"{'installed' if there else absent.format(extra)}: {use}")
        for extra, use in EXTRAS.items()
        for there in [extra in known and not wrong_packages(extra)]
    ]


def wrong_packages(extra: str = "") -> list[str]:
    """Says which packages are missing or have the wrong version, and how to fix it."""
    sentences = []
    for line in importlib.metadata.requires("medfed") or ():
        wanted = Requirement(line)
        marker = wanted.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if (extra == "") != always or (marker and not marker.evaluate({"extra": extra})):
            continue
        mend = f"pip install '{wanted.name}{wanted.specifier}'"
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            sentences.append(f"{wanted.name} is not installed: {mend}.")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            sentences.append(
                f"{wanted.name} is {version}, and {wanted.specifier} is needed: {mend}."
            )
    return sentences


def mistakes(folder: Path) -> Iterator[str]:
    """Yields a sentence for each thing that is wrong here, with the remedy."""
    yield from wrong_packages()
    if driver() is not None and not torch.cuda.is_available():
        yield (
            f"This machine has an NVIDIA driver, {driver()}, but PyTorch {torch.__version__} "
            "cannot use it: install the GPU build that https://pytorch.org/get-started names."
        )
    places = {"outputs": "hydra.run.dir=FOLDER", str(described().data.root): "data.root=FOLDER"}
    for place, key in {**places, tempfile.gettempdir(): "the environment variable TMPDIR"}.items():
        nearest = folder / place
        while not nearest.exists():
            nearest = nearest.parent
        if not os.access(nearest, os.W_OK | os.X_OK):
            yield f"medfed cannot write to {folder / place}: choose another folder by {key}."
    if not can_cache(machine):
        yield NOT_KEPT
