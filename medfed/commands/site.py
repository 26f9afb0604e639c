"""For federations of real sites: ``medfed site check agreed=FILE local=FILE`` at a hospital.

``agree`` writes the file of what all sites agree on, from what ``medfed train`` would be told:
``medfed site agree out=agreed.json sites=a,b experiment=heart_pfednet``. ``cut=true``: every site
holds the same data set, of which the partition cuts out its share, for a demonstration.
``check`` reads a site's own data by both files, shows its patients, and says what would leave.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from medfed.commands.door import loading, one_sentence
from medfed.commands.help import print_usage
from medfed.common.errors import ConfigError, did_you_mean

USAGE = "medfed site check agreed=FILE local=FILE, medfed site agree out=FILE sites=A,B KEY=VALUE"
_OWN = {"check": ("agreed", "local"), "agree": ("out", "sites", "cut")}
_NEEDED = {"check": ("agreed", "local"), "agree": ("out", "sites")}


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
        if what not in _OWN:
            raise ConfigError(
                f"Unknown command medfed site {what}{did_you_mean(what, _OWN)}; there are "
                f"{', '.join(_OWN)}."
            )
        own, overrides = _parted(what, rest)
        if what == "agree":
            _agree(own, overrides)
        else:
            _check(own)


def _parted(what: str, given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The command's own keys, and overrides.

    Raises:
        ConfigError: If a key is unknown or lacking.
    """
    pairs = {a.partition("=")[0]: a.partition("=")[2] for a in given}
    own = {key: value for key, value in pairs.items() if key in _OWN[what]}
    overrides = [a for a in given if a.partition("=")[0] not in own]
    if overrides and what != "agree":
        key = overrides[0].partition("=")[0]
        raise ConfigError(
            f"Unknown key {key!r}{did_you_mean(key, _OWN[what])}; medfed site {what} has "
            f"{', '.join(_OWN[what])}."
        )
    if lacking := [key for key in _NEEDED[what] if not own.get(key)]:
        raise ConfigError(f"{lacking[0]} has no value yet; set it by {lacking[0]}=VALUE.")
    return own, overrides


def _agree(own: dict[str, str], overrides: list[str]) -> None:
    from medfed.sites.agreement import Agreed

    if own.get("cut", "false").lower() not in ("true", "false"):
        raise ConfigError(f"cut must be true or false, not {own['cut']}.")
    sites = [name.strip() for name in own["sites"].strip("[]").split(",")]
    cut = own.get("cut", "false").lower() == "true"
    agreed, _, said = Agreed.of(overrides, sites, cut)
    for line in said:
        print(line)
    agreed.write(Path(own["out"]).expanduser())
    print(f"{own['out']} is for {len(sites)} sites; each looks at it by medfed site check.")


def _check(own: dict[str, str]) -> None:
    # Imported late: mistakes on the command line are answered at once.
    from medfed.sites.agreement import Agreed
    from medfed.sites.own_file import SiteFile

    agreed, local = (Path(own[key]).expanduser() for key in ("agreed", "local"))
    terms, site = Agreed.read(agreed), SiteFile.read(local)
    config = site.config(terms)
    from medfed.sites.check import check_site

    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    check_site(terms, site, config)


if __name__ == "__main__":
    main()
