"""A site's own file: its name, where its data lie, its device; a few lines that its IT writes.

.. code-block:: yaml

    site: cleveland
    folder: /srv/medfed                  # for what the site keeps; null: beside this file
    data:
      path: /data/heart
    trainer: gpu                         # or cpu, the default, or {accelerator: gpu, devices: [1]}

Paths may be relative to the file. Other keys are those of ``medfed train`` that are a site's own
(:data:`medfed.sites.agreement.OWN`) or that it may say otherwise (``READING`` there).
A site whose files are in another layout names a reader of its own, whole:
``data: {path: ..., reader: {_target_: ..., _partial_: true, ...}}``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from medfed.common.errors import ConfigError, MedfedError, did_you_mean
from medfed.common.untrusted import read_yaml
from medfed.config.check import check
from medfed.config.compose import load
from medfed.sites.agreement import OWN, PRECISION, READING, Agreed

_log = logging.getLogger(__name__)
_FOLDER = "medfed"  # beside the file, where no other folder is named
_PATHS = ("data.path", "data.root", "data.cache", "init.weights", "partition.file")
_NOT = ("hydra", "resume", "source", "folder", "plugins", "checkpoint")
_TRAINER = ("accelerator", "devices")
_READER = "data.reader"


@dataclass(frozen=True)
class SiteFile:
    """What a site says of itself.

    Attributes:
        site: Its name in the federation.
        folder: Where it keeps what is its own.
        values: Its own keys.
        plugins: Folders of code that this site runs.
        trainer: An option of the group, or keys of its own.
        logger: An option of the group.
    """

    site: str
    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    trainer: str | Mapping[str, Any] = "cpu"
    logger: str = "none"

    @classmethod
    def read(cls, path: Path) -> SiteFile:
        """Reads a site's file.

        Raises:
            ConfigError: If it cannot be read, or sets what is no site's own.
        """
        try:
            content = read_yaml(path)
        except MedfedError as error:
            raise ConfigError(
                f"The site's own file is not as it must be: {str(error).partition(';')[0]}; it "
                "needs lines such as site: cleveland."
            ) from error
        if not isinstance(content.get("site"), str):
            raise ConfigError(f"{path} must have the site's name, as in site: cleveland.")
        home = path.resolve().parent
        values = dict(_flat(content))
        known: dict[str, Any] = {"site": values.pop("site")}
        folder = values.pop("folder", None)
        known["folder"] = home / _FOLDER if folder is None else _placed(home, "folder", folder)
        plugins = values.pop("plugins", None) or []
        listed = plugins if isinstance(plugins, list) else [plugins]
        known["plugins"] = tuple(str(_placed(home, "plugins", each)) for each in listed)
        for name in ("trainer", "logger"):
            if name in content:
                known[name] = content[name]
        values = {k: v for k, v in values.items() if k.split(".")[0] not in ("trainer", "logger")}
        _check_keys(path, values)
        for key in _PATHS:
            if values.get(key) is not None:
                values[key] = str(_placed(home, key, values[key]))
        return cls(**known, values=values)

    def config(self, agreed: Agreed) -> DictConfig:
        """Composes this site's configuration: the agreed one, with its own keys.

        Args:
            agreed: What all sites have agreed on.

        Raises:
            ConfigError: If the site is none of the federation, or a value cannot be used.
            DataError: If a file or folder that must be there is not.
        """
        if self.site not in agreed.sites:
            raise ConfigError(
                f"site: {self.site} is none of those who agree"
                f"{did_you_mean(self.site, agreed.sites)}; they are {', '.join(agreed.sites)}."
            )
        config = agreed.config(self.plugins)
        if not agreed.cut and not self.values.get("data.path"):
            raise ConfigError(
                f"The file of site {self.site} does not say where its data are; add data: "
                "{path: ...}."
            )
        precision = config.trainer.precision
        option = [f"trainer={self.trainer}"] if isinstance(self.trainer, str) else []
        groups = load([*option, f"logger={self.logger}"])
        with open_dict(config):
            config.trainer = self._own_keys(groups.trainer)
            config.trainer.precision = precision
            config.logger = groups.logger
            config.folder = str(self.folder)
            if "root" in list(config.data):
                config.data.root = str(self.folder / "data")
            if f"{_READER}._target_" in self.values:
                config.data.reader = {}
            for key, value in self.values.items():
                self._set(config, key, value)
        check(config)
        return config

    def _set(self, config: DictConfig, key: str, value: Any) -> None:
        place, _, leaf = key.rpartition(".")
        node = OmegaConf.select(config, place) if place else config
        if isinstance(node, DictConfig) and (leaf in list(node) or place.startswith(_READER)):
            node[leaf] = value
        elif key in OWN:
            _log.info("%s of site %s has no meaning here: these data have none.", key, self.site)
        else:
            raise ConfigError(
                f"{key} is no key of what all have agreed on, so that site {self.site} cannot set "
                "it; take it out of its file."
            )

    def _own_keys(self, found: DictConfig) -> DictConfig:
        """The trainer as this site has it: one device, chosen by itself."""
        if not isinstance(self.trainer, str):
            if odd := [key for key in self.trainer if key not in _TRAINER]:
                raise ConfigError(
                    f"trainer.{odd[0]} is not for a site to set; it chooses "
                    f"{' and '.join(_TRAINER)}."
                )
            found.update(self.trainer)
        found.strategy = "auto"
        devices = found.devices
        if devices != 1 and not (OmegaConf.is_list(devices) and len(devices) == 1):
            raise ConfigError(
                f"trainer.devices={devices} are several, and a site trains one client; give it "
                "one, such as devices: [0]."
            )
        return found


def _flat(content: Mapping[str, Any], place: str = "") -> list[tuple[str, Any]]:
    """Keys with dots; a mapping that is itself the value of a known key stays whole."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{place}{key}"
        if isinstance(value, dict) and value and name not in READING:
            found += _flat(value, f"{name}.")
        else:
            found.append((name, value))
    return found


def _placed(home: Path, key: str, value: object) -> Path:
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a path, not {value!r:.60}.")
    return home / Path(value).expanduser()


def _check_keys(path: Path, values: Mapping[str, Any]) -> None:
    """Refuses keys that a site's file has no say in.

    Raises:
        ConfigError: If there is one; it is named.
    """
    own = [key for key in OWN if key not in _NOT]
    whole = f"{_READER}._target_" in values
    for key in values:
        if key == PRECISION or key in own or key in READING:
            continue
        if whole and key.startswith(f"{_READER}."):
            continue
        if key in _NOT:
            raise ConfigError(f"{path}: {key} is not for a site to set; take it out.")
        hint = did_you_mean(key, [*own, *READING])
        raise ConfigError(
            f"{path}: {key} is agreed among all sites, or no key at all{hint}; a site's own are "
            f"site, {', '.join(own)}; the coordinator can change the others for all."
        )
