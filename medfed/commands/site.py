"""A hospital of a federation: ``medfed site check agreed=FILE local=FILE``.

``request invitation=FOLDER name=SITE folder=KIT`` runs at the hospital. It makes the key of its
kit, which stays there, and a request that the coordinator approves. ``kit signed=FILE
fingerprint=SHA256:… folder=KIT`` then makes the kit; both again renew its key and certificate.
``check`` runs at the hospital. It reads the hospital's data by two files: ``agreed`` (what all
sites agree on; ``medfed deploy dry_run=DIR`` writes it as ``agreed.json``) and ``local`` (the
hospital's file). It shows the patients and says what would leave the hospital.
``describe agreed=FILE local=FILE folder=FOLDER`` runs there, too. It writes ``look.json`` for
``medfed look of=[...]`` at the coordinator, without numbers of few patients; nothing is sent.
``withdraw run=FOLDER site=NAME`` runs at the coordinator. It takes a site out of the remaining
rounds of a stopped run. With ``forget=true`` the server also deletes its state of the site.
``status run=FOLDER`` runs there, too. It shows which sites are there, what happens in which round
since when, and what went over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from medfed.commands.help import print_usage
from medfed.commands.sentences import without_hydra
from medfed.common.processes import loading
from medfed.config.check import check_path
from medfed.records.folder import RunFolder
from medfed.records.places import refusal, refuse_full
from medfed.sites import actions
from medfed.standalone.errors import ConfigError, did_you_mean

_KEYS = {
    "request": {"invitation": "FOLDER", "name": "SITE", "folder": "KIT"},
    "kit": {"signed": "FILE", "fingerprint": "SHA256:…", "folder": "KIT"},
    "check": {"agreed": "FILE", "local": "FILE"},
    "describe": {"agreed": "FILE", "local": "FILE", "folder": "FOLDER"},
    "withdraw": {"run": "FOLDER", "site": "NAME", "forget": "false"},
    "status": {"run": "FOLDER"},
}
_PATHS, _OPTIONAL = ("FOLDER", "FILE", "KIT"), ("forget",)
USAGE = "; ".join(
    " ".join([f"medfed site {name}", *(f"{k}={v}" for k, v in keys.items() if k not in _OPTIONAL)])
    for name, keys in _KEYS.items()
)


@without_hydra(partial(print_usage, USAGE), needs_words=True)
def main(line: Sequence[str]) -> None:
    """Runs the command."""
    with loading():
        what, *rest = line
        if what not in _KEYS:
            raise ConfigError(
                f"Unknown command medfed site {what}{did_you_mean(what, _KEYS)}; the commands are "
                f"{', '.join(_KEYS)}."
            )
        words = read(what, rest).items()
        keys = {k: Path(v).expanduser() if _KEYS[what][k] in _PATHS else v for k, v in words}
        _DO[what](**keys)


def read(what: str, words: Sequence[str]) -> dict[str, str]:
    """Returns the keys of a command."""
    keys = {a.partition("=")[0]: a.partition("=")[2] for a in words}
    for key in keys:
        if key not in _KEYS[what]:
            raise ConfigError(
                f"Unknown key {key!r}{did_you_mean(key, _KEYS[what])}; medfed site {what} has "
                f"{', '.join(_KEYS[what])}."
            )
    if lacking := [key for key in _KEYS[what] if not (keys.get(key) or key in _OPTIONAL)]:
        raise ConfigError(f"{lacking[0]} has no value yet; set it by {lacking[0]}=VALUE.")
    for key in {"agreed", "local", "folder", "run"} & keys.keys():
        check_path(key, keys[key])
    return keys


def _withdraw(run: Path, site: str, forget: str = "false") -> None:
    if forget.lower() not in ("true", "false"):
        raise ConfigError(f"forget must be true or false, not {forget}.")
    if not RunFolder(run).config_yaml.is_file():
        raise ConfigError(refusal(run, name=f"run={run}"))
    print("\n".join(actions.withdraw(run, site, forget.lower() == "true")))


def _describe(agreed: Path, local: Path, folder: Path) -> None:
    refuse_full(folder, otherwise=" by folder=FOLDER")
    actions.check(agreed, local, folder)


_DO: dict[str, Callable[..., Any]] = {
    "request": partial(actions.keys, "request"),
    "kit": partial(actions.keys, "make_kit"),
    "check": actions.check,
    "describe": _describe,
    "withdraw": _withdraw,
    "status": lambda run: actions.show_status(run),
}
