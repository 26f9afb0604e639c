"""The classes and functions that a configuration may build: all that ``_target_`` may name.

To open a run folder from elsewhere, medfed builds the objects that its configuration names, so a
name is code. A configuration may build only:

- what the shipped ``configs`` name, under exactly that name;
- the optimizers, layers, losses, metrics, networks and transforms of libraries (:data:`LIBRARIES`).
  The place of the definition and the base class decide, because ``torch.optim.sgd.torch.load`` is
  spelled like an optimizer but is none;
- what modules define in a folder that the user names by ``plugins=FOLDER``.

The spelling of a name is checked without importing anything. The object behind the name is checked
before the first object is built.

``plugins=FOLDER`` adds a user's methods, codecs, readers and partitions. The folder holds Python
modules and, in ``configs``, yamls in the same groups as those of the project
(``configs/algorithm/my_method.yaml``), whose ``_target_`` names the folder's modules. Its code runs
only if the user names the folder on the command line; a record in a run folder is not enough.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra._internal.utils import _locate

from medfed.config.sections import targets
from medfed.standalone.errors import ConfigError, did_you_mean, first_line

_active: list[Path] = []  # the folders that the user has named to this process
_imported: dict[Path, tuple[int, int]] = {}  # time and size of their files when last looked at


def yamls_of(folder: Path) -> Path:
    """Returns where the yamls of a plugin folder are."""
    return folder / "configs" if (folder / "configs").is_dir() else folder


def plugin_yaml(group: str, name: str) -> Path | None:
    """Returns the yaml of an option that this run's plugin folders have."""
    files = (yamls_of(folder) / group / f"{name}.yaml" for folder in _active)
    return next((file for file in files if file.is_file()), None)


def method_yamls(folders: Iterable[str | Path] = ()) -> dict[str, Path]:
    """Returns the yaml of each method by name, in order, with those of plugin folders.

    Example:
        >>> [*method_yamls()][:3]
        ['adabn', 'adiana', 'apfl']
    """
    places = [CONFIG_DIR, *(yamls_of(Path(folder)) for folder in folders)]
    files = {p.stem: p for place in places for p in (place / "algorithm").glob("*.yaml")}
    return dict(sorted(files.items()))


def method_name(algorithm: Mapping[str, Any]) -> str:
    """Returns a method's name: that of its class, or of its yaml where a plugin has it.

    Of several yamls of one class it is the one whose values are most like the method's.

    Example:
        >>> method_name({"_target_": "medfed.personalize.fedavg.FedAvg"})
        'fedavg'
    """
    target = str(algorithm["_target_"])
    alike = dict[str, int]()
    # Of two folders with a yaml of one name, this run's comes first in the list: it counts.
    for name, file in method_yamls(_active[::-1]).items() if is_plugin(target) else ():
        keys = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        if keys.get("_target_") == target:
            alike[name] = sum(algorithm.get(key) == value for key, value in keys.items())
    return max(alike, key=alike.__getitem__, default=target.rpartition(".")[2].lower())


def add_plugin_folders(folders: Sequence[Path]) -> None:
    """Lets a configuration name what folders define, and Python import it as it is there now.

    A notebook edits a module, or copies its folder, between two runs of one process.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"plugins names {folder}, which is no folder; name one that holds Python modules "
                "and configs."
            )
        for ours in CONFIG_DIR.glob("*/*.yaml"):
            named = yamls_of(folder) / ours.relative_to(CONFIG_DIR)
            taken = ours.parent.name == "suites"  # of a benchmark the user's, with other folders
            if not taken and named.is_file() and named.read_bytes() != ours.read_bytes():
                raise ConfigError(
                    f"{named} has the name of medfed's own, which would be taken; rename the file."
                )
    earlier = [folder for folder in _active if folder not in folders]
    _active[:] = [*dict.fromkeys([*folders, *earlier])]
    paths = [str(folder) for folder in _active]
    # After all installed packages, so that they shadow none; those of this run come first.
    sys.path[:] = [path for path in sys.path if path not in paths] + paths
    changed = [folder for folder in _active if _has_changed(folder)]
    there = [name.removesuffix(".py") for f in _active if f.is_dir() for name in os.listdir(f)]
    theirs = {*there} - {"medfed", "__main__"}
    for name, module in list(sys.modules.items()):
        file, root = getattr(module, "__file__", None), name.partition(".")[0]
        if not file or root not in theirs:
            continue
        # A folder may hold an environment, whose modules are not its plugins.
        inside = Path(file).resolve().is_relative_to
        home = next((f for f in _active if any(map(inside, _places(f, root)))), None)
        hidden = home in earlier and any(p.exists() for f in folders for p in _places(f, root))
        if home in changed or hidden:
            del sys.modules[name]
    importlib.invalidate_caches()


def _places(folder: Path, root: str) -> tuple[Path, Path]:
    """Returns where a plugin folder has a module or a package of this first name."""
    return folder / f"{root}.py", folder / root


def _has_changed(folder: Path) -> bool:
    """Whether a module of a plugin folder has changed since the last look at it."""
    changed = False
    for place, inner, names in os.walk(folder):
        # Thousands of files of an environment would be looked at for each run.
        inner[:] = [
            name
            for name in inner
            if not (name.startswith(".") or Path(place, name, "pyvenv.cfg").exists())
        ]
        for file in (Path(place, name) for name in names if name.endswith(".py")):
            stamp = file.stat().st_mtime_ns, file.stat().st_size
            changed |= _imported.setdefault(file, stamp) != stamp
            _imported[file] = stamp
    return changed


def line_of_plugin(error: BaseException) -> str | None:
    """Returns the last line of a user's plugins that an error passed, if it passed any."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if any(file.is_relative_to(f) for f in _active) and "site-packages" not in file.parts:
            return f"{file}, line {frame.lineno}, in {frame.name}"
    return None


def is_plugin(name: str) -> bool:
    """Returns whether a module or its content lies in a folder that the user has named.

    `name`: a dotted name. Only the file of its first part is looked up; nothing is imported.

    Example:
        >>> is_plugin("os.system")
        False
    """
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations or ()
    return any(Path(p).resolve().is_relative_to(f) for p in places if p for f in _active)


def check_plugins(config: Mapping[str, Any], folder: Path) -> None:
    """Checks that the user has named the plugins with code of a run that is opened again."""
    recorded = [str(p) for p in config.get("plugins") or ()]
    if lacking := [p for p in recorded if Path(p) not in _active and any(Path(p).rglob("*.py"))]:
        raise ConfigError(
            f"The run in {folder} used the plugins in {', '.join(lacking)}; code from there is "
            f"only run if you name it: add plugins=[{','.join(recorded)}]."
        )


def fingerprints(folders: Iterable[str]) -> dict[str, str]:
    """Returns a hash of all Python and yaml files of each plugin folder, for the record."""
    hashes = {}
    for name in folders:
        sha = hashlib.sha256()
        files = [p for kind in ("*.py", "*.yaml") for p in Path(name).rglob(kind)]
        for path in sorted(files):
            sha.update(str(path.relative_to(name)).encode() + b"\0" + path.read_bytes())
        hashes[str(name)] = sha.hexdigest()
    return hashes


# Within the installed package, or next to it in a clone.
_PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = next(p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir())

_MODULE = "torch.nn.modules.module.Module"
_MODULES = ("networks.nets", "networks.blocks", "networks.layers", "losses")
# The start of a name, the place where its class must be defined, and its possible base classes.
_OPTIMIZERS = ("torch.optim.optimizer.Optimizer", "torch.optim.lr_scheduler.LRScheduler")
_TRANSFORMS = r"monai\.transforms\.(compose|croppad|intensity|post|smooth_field|spatial|utility)\."
_METRICS = r"torchmetrics\.(classification|regression|segmentation)\."
LIBRARIES = {
    "torch.optim.": ("torch.optim.", _OPTIMIZERS),
    "torch.nn.": ("torch.nn.modules.", (_MODULE,)),
    **{f"monai.{part}.": (f"monai.{part}.", (_MODULE,)) for part in _MODULES},
    "monai.metrics.": ("monai.metrics.", ("monai.metrics.metric.Metric",)),
    "monai.optimizers.": ("monai.optimizers.", _OPTIMIZERS),
    "torchmetrics.": (_METRICS, ("torchmetrics.metric.Metric",)),
    "monai.transforms.": (_TRANSFORMS, ("monai.transforms.transform.Transform",)),
}
# Exceptions, which call their arguments, take a class by its name, or fetch weights or code.
_NOT = re.compile(
    r"\.(Rand)?(Lambda|TorchVision|TorchIO|CuCIM|DataStats|SimulateDelay|ToDevice)(d|D|Dict)?$"
    r"|\.(Invert|ApplyTransform\w*)(d|D|Dict)?$|^monai\.losses\.perceptual\."
    r"|\.(Transchex|MultiModal|CellSamWrapper|TorchVisionFCModel|TextEncoder)$"
)
_KEY = "_target_"


@cache
def shipped() -> frozenset[str]:
    """Returns all names in the shipped configurations; the yaml of a new method allows it."""
    named = re.compile(rf"^[\s-]*{_KEY}:\s*(\S+)", re.MULTILINE)
    texts = (p.read_text(encoding="utf-8") for p in CONFIG_DIR.rglob("*.yaml"))
    return frozenset(name for text in texts for name in named.findall(text) if name != "???")


def check_targets(plain: Any, place: str = "", exists: bool = False) -> None:
    """Checks every name in a configuration, at any depth, before anything is built.

    Args:
        plain: Mappings and lists, as ``OmegaConf.to_container`` returns them.
        place: Their key.
        exists: Whether to check the objects behind the names, too, which imports them.

    Raises:
        ConfigError: If a name is not allowed; the error names its key.

    Example:
        >>> check_targets({"loss": [{"_target_": "torch.nn.MSELoss"}]}, exists=True)
        >>> check_targets([{"_target_": "torch.optim.sgd.torch.load"}], "optimizer", exists=True)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: optimizer[0]._target_=torch.optim.sgd.torch.load is \
nothing that a configuration may build; name what the shipped configs name, an optimizer, a layer, \
a network, a loss, a metric or a transform of torch or MONAI, or code of your own in a folder that \
you add by plugins=FOLDER.
    """
    nodes = targets(plain, place)
    for key, node in nodes:  # checks all spellings before any import
        if not _is_spelled_well(node[_KEY]):
            raise _refusal(key, node[_KEY])
    if exists:
        for key, node in nodes:
            _check_found(key, node)


def _is_spelled_well(target: object) -> bool:
    # An interpolation could become another name before it is used.
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", target):
        return False
    if target in shipped():
        return True
    if target.startswith("medfed."):
        return False  # also if a plugin folder holds the package itself
    return target.startswith(tuple(LIBRARIES)) or is_plugin(target)


def _check_found(key: str, node: Mapping[Any, Any]) -> None:
    target = str(node[_KEY])
    # A shipped network may be named with other arguments, which would fetch weights.
    if target in shipped() and not target.startswith("monai.networks.nets."):
        return
    try:
        thing = _locate(target)  # as Hydra finds it; Hydra's public function also logs errors
    except Exception as error:  # an import may raise anything; Hydra's message hides the cause
        cause = error.__cause__ or error
        why = first_line(cause)
        raise ConfigError(f"{key}={target} cannot be used as it is: {why}.") from error
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not callable(thing) or not isinstance(module, str) or not isinstance(name, str):
        raise _refusal(key, target)
    rule = next((rule for start, rule in LIBRARIES.items() if target.startswith(start)), None)
    defined = f"{module}.{name}"
    if not (_is_of_library(thing, defined, *rule) if rule else is_plugin(defined)):
        raise _refusal(key, target)
    if rule and _fetches(thing, node):
        raise ConfigError(
            f"{key}={target} would fetch or load trained weights; set its pretrained to false."
        )


def _is_of_library(thing: Any, defined: str, where: str, bases: tuple[str, ...]) -> bool:
    if _NOT.search(defined) or not re.match(where, defined):
        return False
    if not inspect.isclass(thing):  # MONAI's ResNets are made by functions
        return re.fullmatch(r"monai\.networks\.nets\.resnet\.resnet\d+", defined) is not None
    return any(f"{base.__module__}.{base.__qualname__}" in bases for base in thing.__mro__)


def _fetches(thing: Any, node: Mapping[Any, Any]) -> bool:
    """Whether an argument named pretrained is true, by the node or by default."""
    named = {str(k): v for k, v in node.items() if not str(k).startswith("_")}
    try:
        bound = inspect.signature(thing).bind_partial(*node.get("_args_", ()), **named)
    except (TypeError, ValueError):
        return False  # the call itself will report the mistake
    bound.apply_defaults()
    arguments = {**bound.arguments, **named}
    return any(k.startswith("pretrained") and v not in (False, None) for k, v in arguments.items())


def _refusal(key: str, target: object) -> ConfigError:
    if target == "???":
        return ConfigError(f"{key} has no value yet; name what to build by {key}=MODULE.CLASS.")
    return ConfigError(
        f"{key}={target!s:.100} is nothing that a configuration may build"
        f"{did_you_mean(str(target), shipped(), count=1) if 'medfed' in str(target) else ''}; name "
        "what the shipped configs name, an optimizer, a layer, a network, a loss, a metric or a "
        "transform of torch or MONAI, or code of your own in a folder that you add by "
        "plugins=FOLDER."
    )
