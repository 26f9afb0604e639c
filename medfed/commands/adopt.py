"""Turns a MONAI bundle from elsewhere into one of medfed: ``medfed adopt bundle=DIR out=DIR``.

Its code is never run. So the network must be one of MONAI's, of plain arguments; by ``normalize``,
``spacing`` and ``channels`` you say what the bundle's own code does to an input. The new bundle
goes into ``medfed predict``, and among ``bundles`` into the plan of ``medfed study``.
"""

from __future__ import annotations

from medfed.commands.command_line import Command
from medfed.config.sections import Section


@Command("adopt")
def main(config: Section) -> None:
    """Writes the bundle."""
    # Imported here, so that --help and errors in the configuration appear at once.
    from medfed.delivery.start.adopting import adopt

    adopt(config)
