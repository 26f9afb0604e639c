"""Folders of a user's own methods, codecs, readers and partitions: ``plugins=FOLDER``.

A folder holds Python modules and, in ``configs``, yamls in the groups of the project's own
(``configs/algorithm/my_method.yaml``), whose ``_target_`` names the folder's modules. Its code runs
because the user names the folder on the command line; that a run folder records it is not enough.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from medfed.common.errors import ConfigError

KEY = "plugins="
_active: list[Path] = []  # the folders that the user has named to this process


def with_plugins(overrides: Sequence[str]) -> list[str]:
    """Makes the folders of ``plugins=`` importable and their yamls known to Hydra.

    Args:
        overrides: Overrides of which one may be ``plugins=FOLDER`` or ``plugins=[FOLDER,FOLDER]``.

    Returns:
        The overrides with absolute folders, and Hydra's search path.

    Raises:
        ConfigError: If a folder is not there.

    Example:
        >>> with_plugins(["seed=1", "plugins=null"])
        ['seed=1', 'plugins=null']
        >>> with_plugins(["plugins=/no/such/folder"])
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: plugins names /no/such/folder, which is no folder; name \
one that holds Python modules and configs.
    """
    spelled = [o for o in overrides if not o.startswith(KEY)]
    for override in (o for o in overrides if o.startswith(KEY)):
        value = override.removeprefix(KEY).strip("[]")
        names = [name.strip(" \"'") for name in value.split(",")]
        folders = [Path(n).expanduser().resolve() for n in names if n and n != "null"]
        for folder in folders:
            _activate(folder)
        if folders:
            override = KEY + _list(str(f) for f in folders)
            places = [f / "configs" if (f / "configs").is_dir() else f for f in folders]
            spelled.append("hydra.searchpath=" + _list(f"file://{p}" for p in places))
        spelled.append(override)
    return spelled


def _list(values: Iterable[str]) -> str:
    return "[" + ",".join(f'"{v}"' for v in values) + "]"


def _activate(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"plugins names {folder}, which is no folder; name one that holds Python modules and "
            "configs."
        )
    if folder not in _active:
        _active.append(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # behind all that is installed, so that it shadows nothing


def is_plugin(name: str) -> bool:
    """Returns whether a module, or what a module holds, lies in a folder that the user has named.

    Args:
        name: A dotted name; only the place of its first part is looked up, and nothing imported.

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


def check_plugins(config: DictConfig, folder: Path) -> None:
    """Checks that the user has named the plugins of a run that is opened again.

    Args:
        config: The configuration that the run folder holds.
        folder: The run folder, for the error.

    Raises:
        ConfigError: If one is not active.
    """
    recorded = [str(p) for p in config.get("plugins") or ()]
    if lacking := [p for p in recorded if Path(p) not in _active]:
        raise ConfigError(
            f"The run in {folder} used the plugins in {', '.join(lacking)}; code from there is "
            f"only run if you name it: add plugins=[{','.join(recorded)}]."
        )


def fingerprints(config: DictConfig) -> dict[str, str]:
    """Returns a hash of all Python and yaml files of each plugin folder, for the record.

    Args:
        config: The configuration of a run.
    """
    found = {}
    for name in config.get("plugins") or ():
        sha = hashlib.sha256()
        files = [p for kind in ("*.py", "*.yaml") for p in Path(name).rglob(kind)]
        for path in sorted(files):
            sha.update(str(path.relative_to(name)).encode() + b"\0" + path.read_bytes())
        found[str(name)] = sha.hexdigest()
    return found
