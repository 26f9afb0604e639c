"""The agreement of all sites of a federation, and each site's file.

A federation is a list of overrides, as for ``medfed train``, and a list of sites. Each site
composes the configuration itself, from its installed medfed, these overrides and its file
(:mod:`medfed.sites.agreement`). It uses nothing else from the coordinator, and builds only what a
configuration may build.

===================  ==============================================================================
belongs to           keys
===================  ==============================================================================
a site alone         :data:`SITE_KEYS`: where its data and files are, its devices, workers, loggers,
                     plugins; what an override says of them has no effect
a site, if it likes  :data:`READING`: how its files name things, such as the label's column; an
                     override proposes, the site's file disposes, and names of classes and channels
                     are compared as facts of the data
all sites            everything else: model, loss, optimizer, method, channel, budget, cohort, seed,
                     preprocessing, splits, precision; compared by a hash of each key
===================  ==============================================================================

Precision is agreed, as it changes the results of all. Each site chooses its device and threads, as
no one else can, although they change the last bits of its messages.

A site's file (:class:`SiteFile`) has its name, the path of its data, and its device; what it allows
is in :mod:`medfed.sites.policy`.

Paths may be relative to the file. Other keys are those of ``medfed train`` that are a site's own
(:data:`medfed.sites.agreement.SITE_KEYS`) or that it may say otherwise (``READING`` there).
A site whose files are in another layout names another reader, with all its keys:
``data: {path: ..., reader: {_target_: ..., _partial_: true, ...}}``.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec
import yaml  # type: ignore[import-untyped]

from medfed import __version__
from medfed.common import console, schemas, untrusted
from medfed.config.allowed import fingerprints as plugin_hashes
from medfed.config.compose import CONFIG_DIR, load, parse, with_other_data
from medfed.config.description import RunDescription, describe, written
from medfed.config.sections import has, put, select, targets, walk
from medfed.config.spelling import hydra_spelling, key_of
from medfed.sites import installed
from medfed.sites.policy import NO_LIMITS, Hash, Policy
from medfed.sites.words import in_words, veto, words_for
from medfed.standalone.errors import ConfigError, did_you_mean
from medfed.standalone.files import digest, write_text
from medfed.studies.plan import plan_of

_TEMPLATES = Path(__file__).parent / "templates"
_KEYS = yaml.safe_load((_TEMPLATES / "keys.yaml").read_text("utf-8"))
SITE_KEYS: dict[str, Any] = _KEYS["site"]
"""Keys that only a site sets, with their defaults."""
READING: tuple[str, ...] = (*_KEYS["reading"],)
"""Keys that overrides propose: how a site's files are written, and what its memory allows."""
_SECTIONS = ("trainer", "logger", "checkpoint")  # which stand at the project's default
_DATA = ("data.", "partition.")  # a coordinator has no data
PRECISION = "trainer.precision"
_HERE = "data.path=here"  # as if the user had real data
_MOST = 1000  # the most overrides, and characters of each
# Objects that a site builds only for itself, never on request of others.
_NOT = ("pytorch_lightning.", "hydra.", "medfed.commands.", "medfed.run.", "medfed.delivery.export")


Content = Mapping[str, Any] | None
_LATE = ("joins", "plan")  # which most agreements have not


class AgreedRecord(TypedDict):
    """An agreement as it travels, and as ``agreed.json`` has it."""

    medfed: str
    code: str
    sites: tuple[str, ...]
    cut: bool
    overrides: tuple[str, ...]
    joins: NotRequired[schemas.Count]
    plan: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class Agreed:
    """The agreement of a federation's sites."""

    sites: tuple[str, ...]  # names of all sites, in the order of the federation
    # The overrides for ``medfed train``, without those of a site's file.
    overrides: tuple[str, ...] = ()
    # Whether all sites hold the same data set and the partition gives each its share, for a
    # demonstration. Otherwise all patients at a site are its own.
    cut: bool = False
    medfed: str = __version__  # the version of medfed
    # Gradient steps by which the last site joins the others, which have trained; 0: all train
    # together.
    joins: int = 0
    # The hash of its code, from :func:`medfed.sites.installed.code`.
    code: str = field(default_factory=installed.code)
    # What is counted and summed, see :class:`medfed.studies.plan.Plan`; ``None``: the sites train.
    plan: Content = None

    def __post_init__(self) -> None:
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise ConfigError(f"sites={','.join(self.sites)} must name every site, and each once.")
        if odd := next((s for s in self.sites if not re.fullmatch(r"[\w.-]{1,60}", s)), None):
            raise ConfigError(in_words("site_name", site=console.short(odd)))
        installed.check(self.medfed, self.code)
        _check_overrides(self.overrides)
        if self.plan is not None:
            plan_of(self.plan, "The agreement")

    @classmethod
    def of(
        cls, overrides: Sequence[str], sites: Sequence[str], cut: bool = False, plan: Content = None
    ) -> tuple[Agreed, list[str], list[str]]:
        """Makes an agreement from the coordinator's overrides.

        Returns the agreement; the overrides that apply only at the coordinator, such as its logger;
        and a sentence about each override that is not agreed.
        """
        typed = hydra_spelling(overrides)
        if not cut:
            typed = [o for o in with_other_data([*typed, _HERE]) if o != _HERE]
        apart = [o for o in typed if _is_site_key(_key(o))]
        options = [o for o in typed if o not in apart]
        alone = [o for o in apart if not _key(o).startswith(_DATA)]
        precision = load([*options, *alone]).trainer.precision
        if precision != select(usual(), PRECISION) and not any(
            _key(o) == PRECISION for o in options
        ):
            options.append(f"{PRECISION}={precision}")
        only = "{} applies only at the coordinator; sites set it in their files."
        out = "{} is left out: each site sets {} in its file."
        remarks = [(only if o in alone else out).format(o, _key(o)) for o in apart]
        agreed = cls(tuple(sites), tuple(options), cut, plan=plan)
        agreed.config()
        return agreed, alone, remarks

    @classmethod
    def read(cls, path: Path) -> Agreed:
        """Reads the file from `write`."""
        mend = "name the agreed.json that medfed deploy dry_run=FOLDER has written"
        return cls(**untrusted.read_json(path, AgreedRecord, mend))

    def record(self) -> AgreedRecord:
        """Returns the agreement as JSON, the only form that travels."""
        every = vars(self).items()
        return {name: value for name, value in every if value or name not in _LATE}  # type: ignore[return-value]

    @property
    def digest(self) -> str:
        """The hash by which a site approves it."""
        return digest(self.record())

    def write(self, path: Path) -> None:
        """Writes the agreement, so that sites can read it beforehand."""
        write_text(path, json.dumps(self.record(), indent=1) + "\n")

    def config(self, plugins: Sequence[str] = ()) -> RunDescription:
        """Describes the agreed run, with the keys of sites at their defaults.

        `plugins`: the folders that this site has named; code from nowhere else is found.
        """
        named = [f"plugins=[{','.join(plugins)}]"] if plugins else []
        source, plain = written(load([*self.overrides, *named])), usual()
        precision = source["trainer"]["precision"]
        for key, value in SITE_KEYS.items():
            if has(source, key):
                put(source, key, copy.deepcopy(plain[key]) if key in _SECTIONS else value)
        source["trainer"]["precision"] = precision
        source |= {"plugins": list(plugins) or None, "folder": "."}
        _check_targets(source)
        _check_interpolations(source, plugins)
        if not self.cut and "path" not in source["data"]:  # also where it is ???
            made_by = source["data"]["_target_"].rpartition(".")[2]
            raise ConfigError(in_words("generated", made_by=made_by))
        if source.get("keep_out"):
            raise ConfigError("keep_out is for simulations; leave these sites out of sites.")
        return describe(source)


@cache
def usual() -> dict[str, Any]:
    """Returns the configuration without any override; do not change it."""
    return written(load())


def agreed_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a configuration that all sites must share, by key, as JSON.

    Example:
        >>> agreed_values({"seed": 1, "threads": 4, "data": {"path": "/a", "seed": 1}})
        {'seed': 1, 'data.seed': 1}
    """
    every = walk(_agreed_part(config), lists=False)
    values = {key: value for key, value in every if not (isinstance(value, dict) and value)}
    codes = sorted(plugin_hashes(config.get("plugins") or ()).values())
    return {**values, **({"plugins": codes} if codes else {})}


def fingerprints(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a hash of each agreed value, by key, so that no value travels.

    Example:
        >>> fingerprints({"seed": 1})
        {'seed': '6b86b273ff34fce1'}
    """
    return {
        key: sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in sorted(agreed_values(config).items())
    }


def _agreed_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration without the keys that a site may set; precision stays."""
    made = written(config)
    precision = select(made, PRECISION)
    for key in (*SITE_KEYS, *READING):
        place, _, leaf = key.rpartition(".")
        if has(made, key):
            del (select(made, place) if place else made)[leaf]
    if precision is not None:
        made["trainer"] = {"precision": precision}
    return made


def _key(override: str) -> str:
    """The key of an override, without signs and a group's package."""
    return key_of(override).rpartition("@")[2]


def _is_site_key(key: str) -> bool:
    if key == PRECISION:
        return False
    return any(key == each or key.startswith(f"{each}.") for each in SITE_KEYS)


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuses overrides other than one value of one key, before composing."""
    if len(overrides) > _MOST or any(len(o) > _MOST for o in overrides):
        raise ConfigError(f"More than {_MOST} overrides, or characters in one, are refused.")
    for override in overrides:
        if _is_site_key(_key(override)):
            raise ConfigError(f"{_key(override)} belongs to each site's file, not to agreements.")
    for override in parse(hydra_spelling(overrides), "The overrides"):
        if override.is_sweep_override():
            raise ConfigError(f"{override.get_key_element()} has several values; choose one.")


def _check_interpolations(config: dict[str, Any], plugins: Sequence[str]) -> None:
    """Refuses interpolations other than those of the files that are installed here."""
    known = _interpolations(CONFIG_DIR).union(*(_interpolations(Path(each)) for each in plugins))
    for key, value in walk(config):
        name = _leaf(key)
        if "${" in key or (isinstance(value, str) and "${" in value and (name, value) not in known):
            raise ConfigError(in_words("interpolation", key=key, value=str(value)))


@cache
def _interpolations(folder: Path) -> frozenset[tuple[str, str]]:
    """The interpolations of a folder's configurations, each with its key."""
    texts = (path.read_text("utf-8") for path in sorted(folder.rglob("*.yaml")))
    contents = [yaml.load(text, yaml.CSafeLoader) for text in texts if "${" in text]
    every = ((_leaf(key), value) for content in contents for key, value in walk(content))
    return frozenset(pair for pair in every if isinstance(pair[1], str) and "${" in pair[1])


def _leaf(key: str) -> str:
    """The last name in a key, without the place in a list."""
    return re.sub(r"(\[\d+\])+$", "", key).rpartition(".")[2]


def _check_targets(config: Mapping[str, Any]) -> None:
    """Refuses, at any place, names that a site builds only for itself."""
    for key, node in targets(_agreed_part(config)):
        if str(target := node["_target_"]).startswith(_NOT):
            raise ConfigError(in_words("target", key=key, target=target))


_log = logging.getLogger(__name__)
_FOLDER = "medfed"  # next to the file, if no other folder is named
_PATHS = ("data.path", "data.root", "data.cache", "init.weights", "partition.file")
_NOT_IN_FILE = ("hydra", "resume", "source", "folder", "plugins", "checkpoint")
_TRAINER = ("accelerator", "devices")
_READER = "data.reader"


class _Known(msgspec.Struct):
    """The keys of a site's file that do not configure its run; the others stay as they are."""

    site: str
    folder: str | None = None
    plugins: str | list[str] | None = None
    trainer: str | dict[str, Any] = "cpu"
    logger: str = "none"
    agreed: Hash | list[Hash] | msgspec.UnsetType = msgspec.UNSET
    policy: Policy = NO_LIMITS


_KNOWN = _Known.__struct_fields__
_CORRECT = "correct the site's file: lines such as site: cleveland, indented by spaces, not by tabs"
_HINTS = {
    "site": "; it must have the site's name, as in site: cleveland",
    "agreed": "; agreed must be the 64 letters and digits that medfed site check prints, or a list "
    "of such lines",
    "policy": f"; the keys of policy are {', '.join(Policy.__struct_fields__)}",
}


@dataclass(frozen=True)
class SiteFile:
    """The content of a site's file."""

    site: str  # its name in the federation
    folder: Path  # its folder for its results
    values: Mapping[str, Any] = field(default_factory=dict)  # its keys
    plugins: tuple[str, ...] = ()  # folders of code that this site runs
    trainer: str | Mapping[str, Any] = "cpu"  # an option of the group, or some of its keys
    logger: str = "none"  # an option of the group
    # Hashes of the agreements that may run here; ``None``: any may.
    approved: tuple[str, ...] | None = None
    policy: Policy = NO_LIMITS  # its limits, for every agreement

    @classmethod
    def read(cls, path: Path) -> SiteFile:
        """Reads a site's file."""
        content = untrusted.read_yaml(path, what_to_do=_CORRECT)
        if empty := [k for k, v in content.items() if v is None and k not in ("folder", "plugins")]:
            raise ConfigError(in_words("no_value", path=path, key=empty[0]))
        try:
            known = schemas.fit(content, _Known)
        except ValueError as error:
            hint = _HINTS.get(re.split(r"\W", str(error))[0], "")
            raise ConfigError(f"{path} cannot be used ({error}){hint}.") from error
        home = path.resolve().parent
        others = {key: value for key, value in content.items() if key not in _KNOWN}
        values = {k: v for k, v in walk(others, lists=False)[1:] if _is_value(k, v)}
        _check_keys(path, values)
        for key in _PATHS:
            if (value := values.get(key)) is not None:
                if not isinstance(value, str):
                    raise ConfigError(f"{key} must be a path, not {value!r:.60}.")
                values[key] = str(home / Path(value).expanduser())
        plugins = [known.plugins] if isinstance(known.plugins, str) else known.plugins or []
        approved = (known.agreed,) if isinstance(known.agreed, str) else known.agreed
        folder = home / Path(known.folder or _FOLDER).expanduser()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise ConfigError(in_words("folder", path=path, folder=folder, there=there))
        code = tuple(str(home / Path(each).expanduser()) for each in plugins)
        named = None if approved is msgspec.UNSET else tuple(approved)
        how = known.trainer, known.logger
        return cls(known.site, folder, values, code, *how, named, known.policy)

    def check_approved(self, agreed: Agreed) -> None:
        """Refuses a study that the file does not name, where it names any."""
        if self.approved is not None and agreed.digest not in self.approved:
            others = ", ".join(self.approved) or "none"
            words = {"site": self.site, "hash": agreed.digest, "others": others}
            raise veto("approved", "agreed", **words)

    def approval(self, agreed: Agreed) -> str:
        """Says whether a study is approved here, and by which line it is."""
        known = "others" if self.approved is not None else "open"
        how = "named" if agreed.digest in (self.approved or ()) else known
        return words_for("approval")[how].format(site=self.site, hash=agreed.digest)

    def config(self, agreed: Agreed) -> RunDescription:
        """Describes this site's run: the agreement with the site's keys."""
        if self.site not in agreed.sites:
            words = {
                "hint": did_you_mean(self.site, agreed.sites),
                "sites": ", ".join(agreed.sites),
            }
            raise ConfigError(in_words("no_site", site=self.site, **words))
        if self.plugins and not self.policy.plugins:
            raise veto("plugins", site=self.site)
        source = written(agreed.config(self.plugins))
        if not agreed.cut and not self.values.get("data.path"):
            file = f"The file of site {self.site}"
            raise ConfigError(f"{file} does not name its data; add data: {{path: ...}}.")
        option = [f"trainer={self.trainer}"] if isinstance(self.trainer, str) else []
        groups = written(load([*option, f"logger={self.logger}"]))
        trainer = {**self._trainer_with(groups["trainer"]), "precision": select(source, PRECISION)}
        source |= {"trainer": trainer, "logger": groups["logger"], "folder": str(self.folder)}
        if "root" in source["data"]:
            source["data"]["root"] = str(self.folder / "data")
        if f"{_READER}._target_" in self.values:
            source["data"]["reader"] = {}
        for key, value in self.values.items():
            if has(source, key) or key.startswith(f"{_READER}."):
                put(source, key, value)
            elif key in SITE_KEYS:
                what = "has no meaning here: these data have none."
                _log.info("%s of site %s %s", key, self.site, what)
            else:
                raise ConfigError(in_words("no_key", key=key, site=self.site))
        if not self.policy.pictures:
            put(source, "pictures.format", "none")
        return describe(source)

    def _trainer_with(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """This site's trainer: one device, chosen by the site."""
        if not isinstance(self.trainer, str):
            if odd := [key for key in self.trainer if key not in _TRAINER]:
                raise ConfigError(f"trainer.{odd[0]} is not for a site; set {', '.join(_TRAINER)}.")
            trainer |= self.trainer
        trainer["strategy"] = "auto"
        devices = trainer["devices"]
        if devices != 1 and not (isinstance(devices, list) and len(devices) == 1):
            raise ConfigError(in_words("devices", devices=devices))
        return trainer


def _is_value(key: str, value: Any) -> bool:
    """Whether a key has a value; a mapping that is itself the value of a known key stays whole."""
    inside = any(key.startswith(f"{whole}.") for whole in READING)
    return key in READING or not (inside or (isinstance(value, dict) and value))


def _check_keys(path: Path, values: Mapping[str, Any]) -> None:
    """Refuses keys that a site's file may not set."""
    allowed = [key for key in SITE_KEYS if key not in _NOT_IN_FILE]
    known, whole = {*allowed, *READING}, f"{_READER}._target_" in values
    for key in values:
        above, _, rest = key.partition(".")
        if above in _KNOWN:  # with a dot, as on a command line
            raise ConfigError(f"{path}: write {key} as {above}: {{{rest}: ...}}.")
        if key in known or (whole and key.startswith(f"{_READER}.")):
            continue
        if key in _NOT_IN_FILE:
            raise ConfigError(f"{path}: {key} is not for a site to set; take it out.")
        below = (f"policy.{name}" for name in Policy.__struct_fields__)
        hint = did_you_mean(key, ["agreed", "policy", *allowed, *READING, *below])
        raise ConfigError(
            in_words("unknown_key", path=path, key=key, hint=hint, own=", ".join(allowed))
        )
