"""Checks or withdraws a hospital of a federation: ``medfed site check agreed=FILE local=FILE``.

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

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from medfed.commands.command_line import loading, plain
from medfed.commands.help import print_usage
from medfed.common.errors import ConfigError, did_you_mean
from medfed.config.check import check_path
from medfed.records.folder import RunFolder
from medfed.records.places import refuse_full
from medfed.sites import actions

USAGE = (
    "medfed site check agreed=FILE local=FILE; "
    "medfed site describe agreed=FILE local=FILE folder=FOLDER; "
    "medfed site withdraw run=FOLDER site=NAME; "
    "medfed site status run=FOLDER"
)
_KEYS = {
    "check": ("agreed", "local"),
    "describe": ("agreed", "local", "folder"),
    "withdraw": ("run", "site", "forget"),
    "status": ("run",),
}
_OPTIONAL = ("forget",)


@plain(partial(print_usage, USAGE), needs_words=True)
def main(given: Sequence[str]) -> None:
    """Runs the command."""
    with loading():
        what, *rest = given
        if what not in _KEYS:
            raise ConfigError(
                f"Unknown command medfed site {what}{did_you_mean(what, _KEYS)}; the commands are "
                f"{', '.join(_KEYS)}."
            )
        keys = read(what, rest)
        {"withdraw": _withdraw, "status": _status}.get(what, _check)(keys)


def read(what: str, given: Sequence[str]) -> dict[str, str]:
    """Returns the keys of a command.

    Args:
        what: The command, such as ``check``.
        given: The rest of the command line.

    Raises:
        ConfigError: If a key is unknown or missing.
    """
    keys = {a.partition("=")[0]: a.partition("=")[2] for a in given}
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


def _withdraw(keys: dict[str, str]) -> None:
    forget = keys.get("forget", "false").lower()
    if forget not in ("true", "false"):
        raise ConfigError(f"forget must be true or false, not {keys['forget']}.")
    folder = Path(keys["run"]).expanduser()
    if not RunFolder(folder).config_yaml.is_file():
        raise ConfigError(f"run={folder} is no run folder (it has no config.yaml).")
    for line in actions.withdraw(folder, keys["site"], forget == "true"):
        print(line)


def _status(keys: dict[str, str]) -> None:
    actions.show_status(Path(keys["run"]).expanduser())


def _check(keys: dict[str, str]) -> None:
    places = {key: Path(value).expanduser() for key, value in keys.items()}
    if "folder" in places:
        refuse_full(places["folder"], otherwise=" by folder=FOLDER")
    actions.check(**places)
