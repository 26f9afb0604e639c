"""Hydra composes thousands of configurations here, from the same files and overrides each time.

So each file is parsed once, each override is parsed once, and each list of defaults is made and
merged once; what is taken from memory is a copy. A file that has changed is read anew.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_list = defaults_list._create_defaults_list
_choices = defaults_list._create_interpolation_map
_parse_rule = OverridesParser.parse_rule
_parsed: dict[Hashable, bytes] = {}
_listed: dict[bytes, tuple[tuple[Any, ...], bytes]] = {}
_merged: dict[Hashable, bytes] = {}
_overrides: dict[str, Override] = {}


def _remember_files(source: type[ConfigSource]) -> None:
    parse = source.load_config

    def load_config(self: ConfigSource, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        key = (self.provider, file, _state(file))
        if key not in _parsed:
            _parsed[key] = pickle.dumps(parse(self, config_path))
        result = pickle.loads(_parsed[key])
        result.key = key
        return result

    source.load_config = load_config


class Listed(list[ResultDefault]):
    """A list of defaults that knows the states of its files."""

    files: tuple[Hashable, ...] = ()


def _list_once(repo: Any, config: str | None, overrides: Any, **options: bool) -> Any:
    """The overrides note what they have done, so that their notes are remembered with the list."""
    notes = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}
    sources = [(source.provider, source.path) for source in repo.get_sources()]
    key = pickle.dumps((sources, config, notes, options))
    if key in _listed:
        files, made = _listed[key]
        if all(_state(file) == state for _, file, state in files):
            (defaults, tree), notes = pickle.loads(made)
            vars(overrides).update(notes)
            defaults = Listed(defaults)
            defaults.files = files
            return defaults, tree
    result = _list(repo, config, overrides, **options)
    notes = {name: vars(overrides)[name] for name in notes}
    places = [default.config_path for default in result[0]]  # of what is no file, all there is
    files = tuple(getattr(repo.load_config(place), "key", (place, None, None)) for place in places)
    _listed[key] = files, pickle.dumps((result, notes))
    return result


def _state(file: Path | None) -> Hashable:
    found = file.stat() if file and file.is_file() else None  # None: in a package, or absent
    return found and (found.st_mtime_ns, found.st_size)


def _merge_once(self: ConfigLoaderImpl, defaults: Sequence[ResultDefault], repo: Any) -> DictConfig:
    if not isinstance(defaults, Listed):
        return _merge(self, defaults, repo)
    key = defaults.files, tuple((one.package, one.primary) for one in defaults)
    if key not in _merged:
        _merged[key] = pickle.dumps(_merge(self, defaults, repo))
    return pickle.loads(_merged[key])


def _choices_if_read(overrides: Any, defaults: Sequence[InputDefault], *rest: Any) -> Any:
    read = any(default.is_interpolation() for default in defaults)
    return _choices(overrides, defaults, *rest) if read else None


def _parse_once(self: OverridesParser, text: str, rule: str) -> Any:
    if rule != "override":
        return _parse_rule(self, text, rule)
    if text not in _overrides:
        override = _parse_rule(self, text, rule)
        if override.is_sweep_override():  # its values are an iterator
            return override
        _overrides[text] = override
    return copy.deepcopy(_overrides[text])


def install() -> None:
    """Puts the memory into Hydra."""
    Plugins.instance()  # executes the modules of the sources anew, so it comes first
    for scheme in ("file", "pkg"):
        _remember_files(SourcesRegistry.instance().resolve(scheme))
    ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once
    defaults_list._create_defaults_list = _list_once
    defaults_list._create_interpolation_map = _choices_if_read
    OverridesParser.parse_rule = _parse_once
