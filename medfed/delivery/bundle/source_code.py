"""The source of your own network: copied into a bundle, and run only if its user accepts it.

Another computer does not have the code of a plugin folder. So the bundle holds the files that
define the network, unchanged, in ``scripts/plugins``. ``medfed predict`` runs them only if its user
names their hash: ``accept_code=HASH``. Python runs the bytes that were hashed, from a new folder;
it neither reads nor writes compiled files in the bundle.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from medfed.common.errors import CheckpointError, ConfigError, first_line
from medfed.common.files import digest, sha256
from medfed.delivery.bundle import scripts

PLUGINS = "scripts/plugins"
PACKAGE = "scripts.plugins"
INIT = '''"""The source of the network, as it was trained; see docs/README.md."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # its files import each other
'''
# As well as medfed/delivery/bundle/scripts; they need what MONAI and Pillow need.
CARRIED = {
    "common": ("checks", "errors", "files", "seeding"),
    "datamodules": ("ct_patches", "preparation"),
    "datamodules/readers": ("csv_files", "dicom", "itk", "pictures", "volumes"),
    "datamodules/tables": ("columns",),
    "functional": ("grids",),
    "models": ("inference",),
    "models/networks": ("densenet", "mixture", "outputs", "small", "unet"),
}
_OF_MEDFED = re.compile(r"^( *)from medfed((?:\.\w+)*) import", re.MULTILINE)
_PREFIX = "sha256-"
_LEAST = 8  # digits of a hash that a person must have copied
_FILE = re.compile(r"([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py")
_TAKEN = {*sys.stdlib_module_names, "torch", "monai", "numpy", "medfed", "scripts"}


def carried() -> dict[str, str]:
    """Returns the files of ``scripts``, which run a bundle where medfed is not installed.

    They are modules of medfed as they are, so that ``medfed predict`` and a bundle are one
    inference; only their imports of each other name ``scripts``.

    Example:
        >>> [line for line in carried()["predictor.py"].splitlines() if "scripts.masks" in line]
        ['from scripts.masks import largest_part']
    """
    folder = Path(scripts.__path__[0])
    root = folder.parents[2]
    paths = [root / place / f"{name}.py" for place, names in CARRIED.items() for name in names]
    paths += folder.glob("*.py")
    files = {path.name: path for path in sorted(paths, key=lambda path: path.name)}

    def renamed(line: re.Match[str]) -> str:
        module = line[2].rpartition(".")[2]  # of a package, modules are imported
        return f"{line[1]}from scripts{f'.{module}' * (f'{module}.py' in files)} import"

    return {
        name: _OF_MEDFED.sub(renamed, path.read_text(encoding="utf-8"))
        for name, path in files.items()
    }


def source_files(module: str) -> dict[str, Path]:
    """Finds the files that a module of a plugin folder is made of.

    Args:
        module: Its dotted name; it can be imported.

    Returns:
        The module's file, and those that it imports from the same folder, by their names there.

    Raises:
        ConfigError: If one of them imports medfed, which a hospital need not have, or has no
            source.
    """
    top = module.partition(".")[0]
    spec = find_spec(top)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    origin = next((place for place in places if place), None)
    if origin is None or not Path(origin).exists():
        raise ConfigError(f"The network's module {module} has no file that a bundle could hold.")
    root = Path(origin)
    root = root.parent.parent if root.name == "__init__.py" else root.parent
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        for path in _files_of(root, waiting.pop()):
            name = path.relative_to(root).as_posix()
            if name not in files:
                files[name] = path
                waiting += _imported(path, name)
    if not files:
        raise ConfigError(f"The network's module {module} has no source in {root}.")
    return dict(sorted(files.items()))


def describe_code(targets: Sequence[str]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Describes the source of networks from plugin folders.

    Args:
        targets: Dotted names of classes or functions.

    Returns:
        ``files`` with their hashes by name, the ``hash`` of all, and the packages that they
        ``require`` in addition to PyTorch and MONAI, with versions; and the files' paths by name.

    Raises:
        ConfigError: See :func:`source_files`.
    """
    paths: dict[str, Path] = {}
    for target in targets:
        paths |= source_files(_module_of(target))
    hashes = {name: sha256(path) for name, path in sorted(paths.items())}
    required = _required(paths)
    return {"files": hashes, "hash": digest(hashes), "require": required}, paths


def has_modules(files: Iterable[str]) -> bool:
    """Says whether files are of Python and hide no module of others.

    Example:
        >>> has_modules(["a/net.py"]), has_modules(["../net.py"])
        (True, False)
    """
    return all(_FILE.fullmatch(n) and re.split(r"[/.]", n)[0] not in _TAKEN for n in files)


def check_accepted(code: Mapping[str, Any], accepted: Sequence[str], folder: Path) -> None:
    """Refuses to run source that the user has not accepted by its hash.

    Args:
        code: From :func:`describe_code`, as the metadata have it.
        accepted: Hashes, or at least eight first digits of them, after ``sha256-`` or alone.
        folder: The bundle, for the sentence.

    Raises:
        CheckpointError: If the hash is not among them.
    """
    if digest(code["files"]) != code["hash"]:
        raise CheckpointError(f"{folder}: code.hash is not that of its files; export it anew.")
    known = (a.lower().removeprefix(_PREFIX) for a in accepted)
    if any(len(a) >= _LEAST and code["hash"].startswith(a) for a in known):
        return
    raise CheckpointError(
        f"The network of {folder} is source code of its own ({PLUGINS}: {', '.join(code['files'])})"
        f", which could do anything; read it, and where you trust it, add "
        f"accept_code={short_hash(code)}."
    )


def short_hash(code: Mapping[str, Any]) -> str:
    """Returns what a user names to accept source; a word, for hashes of digits look like numbers.

    Example:
        >>> short_hash({"hash": "0123456789abcdef"})
        'sha256-0123456789ab'
    """
    return f"{_PREFIX}{code['hash'][:12]}"


@contextmanager
def source_of(folder: Path, code: Mapping[str, Any]) -> Iterator[None]:
    """Makes a bundle's own modules importable, for as long as a network is built.

    Args:
        folder: The bundle.
        code: From :func:`describe_code`.

    Raises:
        CheckpointError: If a file is missing or not the one that was exported.
    """
    tops = {re.split(r"[/.]", name)[0] for name in code["files"]}
    with tempfile.TemporaryDirectory(prefix="medfed-") as place:
        for name, known in code["files"].items():
            path = folder / PLUGINS / name
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != known:
                raise CheckpointError(f"{path} is not the file that was exported; copy it again.")
            # What was hashed is what is imported: a file changed in between is not read again.
            (copy := Path(place, name)).parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
        before = _taken_out(tops)
        sys.path.insert(0, place)
        invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(place)
            _taken_out(tops)
            sys.modules.update(before)


def _taken_out(tops: Iterable[str]) -> dict[str, ModuleType]:
    """Takes modules and what they hold out of those that are imported."""
    known = [name for name in sys.modules if name.partition(".")[0] in tops]
    return {name: sys.modules.pop(name) for name in known}


def _module_of(target: str) -> str:
    """The module in a dotted name; what it holds may be nested in a class."""
    name = target.rpartition(".")[0]
    while name:
        try:
            import_module(name)
        except ImportError:
            name = name.rpartition(".")[0]
        else:
            return name
    raise ConfigError(f"The network {target} is in no module that can be imported.")


def _files_of(root: Path, module: str) -> list[Path]:
    """A module's file below the root, and the ``__init__.py`` of the packages around it."""
    parts = module.split(".")
    around = [root.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
    module_file = root.joinpath(*parts).with_suffix(".py")
    return [path for path in (*around, module_file) if path.is_file()]


def _imported(path: Path, name: str) -> list[str]:
    """Dotted names that a file imports; relative ones in full."""
    package = name.rpartition("/")[0].replace("/", ".")
    modules: list[str] = []
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            modules += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    tops = {module.partition(".")[0] for module in modules}
    if "medfed" in tops:
        raise ConfigError(
            f"{path} imports medfed, which a hospital need not have; put the network into a file "
            "that imports PyTorch and MONAI alone."
        )
    return [m for m in modules if m and m.partition(".")[0] not in sys.stdlib_module_names]


@functools.cache
def installed_by_module() -> Mapping[str, list[str]]:
    """Returns the installed distributions by module; reading their files takes 0.2 seconds.

    Example:
        >>> installed_by_module()["torch"]
        ['torch']
    """
    return packages_distributions()


def _required(paths: Mapping[str, Path]) -> dict[str, str]:
    """Installed packages that files import, without those that every bundle needs."""
    here = {name.split("/")[0].removesuffix(".py") for name in paths}
    tops = {m.partition(".")[0] for name, path in paths.items() for m in _imported(path, name)}
    known = installed_by_module()
    names = {d for top in tops - here - {"torch", "monai"} for d in known.get(top, ())}
    return {name: version(name) for name in sorted(names)}


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Python ({first_line(error)}).") from error
