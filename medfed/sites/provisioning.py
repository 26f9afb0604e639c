"""The kits of a new federation, and what to do with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from medfed.common.errors import ConfigError
from medfed.common.files import write_text

ADMIN = "coordinator@medfed.local"
"""Who submits; FLARE asks for the form of an address, and writes to nobody."""
PROJECT = "medfed"


@contextmanager
def needs_flare() -> Iterator[None]:
    """Says in one sentence how to get NVIDIA FLARE where it is absent.

    Raises:
        ConfigError: If it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("nvflare", "psutil"):
            raise
        raise ConfigError(
            'Runs across hospitals need NVIDIA FLARE; install it by pip install "medfed[sites]".'
        ) from error


def make_kits(folder: Path, sites: Sequence[str], server: str, port: int) -> Path:
    """Makes a kit for FLARE's server, each site and the coordinator, and says what is next.

    Args:
        folder: Where; those of an earlier call stay, and a site that is added has the same root.
        sites: Names of the sites.
        server: What they call the server by.
        port: The one port that they call.

    Returns:
        The folder that holds the kits.

    Raises:
        ConfigError: If FLARE is absent, or refuses a name.
    """
    with needs_flare():
        from medfed.sites.flare.kits import project, provision

    content = project(PROJECT, sites, server, port, ADMIN)
    kits = provision(content, folder)
    write_text(folder / "project.yml", OmegaConf.to_yaml(content))
    print(
        f"The kits are in {kits}; each holds a key, so that it goes to its owner alone.\n"
        f"  {server}: unpack on the server's machine, open port {port}, startup/start.sh\n"
        f"  {', '.join(sites)}: one for each hospital, which checks it there by\n"
        "    nvflare preflight-check -p KIT, writes local/medfed.yaml, and runs startup/start.sh\n"
        f"  {ADMIN}: medfed deploy kit={kits / ADMIN} sites=[{','.join(sites)}] experiment=..."
    )
    return kits
