"""For federations of real sites: ``medfed site check agreed=FILE local=FILE`` at a hospital.

``check`` reads a site's own data as all have agreed (``agreed.json``, which ``medfed deploy
dry_run=DIR`` writes) and as its own file says, shows its patients, and says what would leave.
``withdraw run=FOLDER site=NAME`` takes a site out of the rounds to come of a run that has stopped,
at the coordinator; with ``forget=true`` the server forgets what it keeps of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from medfed.commands.command_line import loading, one_sentence
from medfed.commands.help import print_usage
from medfed.common.errors import ConfigError, did_you_mean
from medfed.records.folder import RunFolder
from medfed.sites import actions

USAGE = "medfed site check agreed=FILE local=FILE; medfed site withdraw run=FOLDER site=NAME"
_KEYS = {"check": ("agreed", "local"), "withdraw": ("run", "site", "forget")}
_NEEDED = {"check": ("agreed", "local"), "withdraw": ("run", "site")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: The command line without the program; ``None``: this process's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or {"-h", "--help"} & set(given):
        print_usage(USAGE, __doc__ or "")
        return
    with one_sentence(), loading():
        what, *rest = given
        if what not in _KEYS:
            raise ConfigError(
                f"Unknown command medfed site {what}{did_you_mean(what, _KEYS)}; there are "
                f"{', '.join(_KEYS)}."
            )
        keys = read(what, rest)
        if what == "withdraw":
            _withdraw(keys)
        else:
            _check(keys)


def read(what: str, given: Sequence[str]) -> dict[str, str]:
    """Returns the keys of a command.

    Args:
        what: Which one.
        given: The rest of the line.

    Raises:
        ConfigError: If a key is unknown or lacking.
    """
    keys = {a.partition("=")[0]: a.partition("=")[2] for a in given}
    for key in keys:
        if key not in _KEYS[what]:
            raise ConfigError(
                f"Unknown key {key!r}{did_you_mean(key, _KEYS[what])}; medfed site {what} has "
                f"{', '.join(_KEYS[what])}."
            )
    if lacking := [key for key in _NEEDED[what] if not keys.get(key)]:
        raise ConfigError(f"{lacking[0]} has no value yet; set it by {lacking[0]}=VALUE.")
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


def _check(keys: dict[str, str]) -> None:
    actions.check(*(Path(keys[key]).expanduser() for key in ("agreed", "local")))


if __name__ == "__main__":
    main()
