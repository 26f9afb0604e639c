"""The names of a hospital's files, in which a patient's name may be, never leave it.

A site counts the files that it takes and leaves out, with an example of each (its *account*); its
errors name files, too. Both are for its own log and folder alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfed.standalone.errors import SiteError
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK, across, site

SITES = ("north", "south")
NAME = "Geheimrat"
WORDS = (
    *("data=image_folder", "model=small_cnn", "algorithm=fedavg", "data.reader.size=[8,8]"),
    *("model.network.channels=[4,4,4]", "rounds=1", "local.steps=1", "logger=none"),
    "progress=false",
)


class Listening(Direct):
    """Keeps every byte that a site sends."""

    def __init__(self, sites):
        super().__init__(sites)
        self.heard: list[bytes] = []

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        self.heard.append(super().call(site, request, timeout))
        return self.heard[-1]


def pictures(folder: Path, seed: int) -> Path:
    """Pictures of two classes; each file, and each that is left out, has a patient's name."""
    rng = np.random.default_rng(seed)
    for kind in ("benign", "cancer"):
        (folder / kind).mkdir(parents=True)
        for n in range(12):
            pixels = rng.integers(0, 255, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / kind / f"{NAME}_{n}.png")
        (folder / kind / f"{NAME}_0_mask.png").write_bytes(
            (folder / kind / f"{NAME}_0.png").read_bytes()
        )
    (folder / f"{NAME}.txt").write_text(NAME)
    (folder / f"{NAME}.xyz").write_text(NAME)
    return folder


def listening(folder: Path) -> Listening:
    """Both sites, whose data are at a path of the same name."""
    made = {}
    for seed, name in enumerate(SITES):
        path = f"data.path={pictures(folder / 'data' / f'{NAME}_{name}', seed)}"
        made[name] = site(folder / name, name, *WORDS, path, sites=list(SITES))
    return Listening(made)


def test_no_name_of_a_file_is_in_any_message(tmp_path):
    transport = listening(tmp_path)
    across(tmp_path / "server", transport, list(SITES), *WORDS, "data.path=null")
    heard = b"".join(transport.heard)
    assert b"benign" in heard  # names of classes are agreed on, and messages can be searched
    for spelling in (NAME, NAME.upper(), NAME.lower()):
        assert spelling.encode() not in heard
    here = (p for p in (tmp_path / "server").rglob("*") if p.is_file())
    assert not [path for path in here if NAME.encode() in path.read_bytes()]
    # The account itself has the name: it would be there, if it left.
    data = transport.sites["north"].workplace.data
    assert any(NAME in str(account.record()["left_out"]) for account in data.accounts)


@pytest.mark.parametrize("what", ["torn", "no image"])
def test_an_error_that_names_a_file_stays(what, tmp_path, caplog):
    transport = listening(tmp_path)
    file = tmp_path / "data" / f"{NAME}_south" / "cancer" / f"{NAME}_3.png"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if what == "torn" else b"no image")
    with pytest.raises(SiteError, match="DataError") as error:
        across(tmp_path / "server", transport, list(SITES), *WORDS, "data.path=null", terms=QUICK)
    assert NAME not in str(error.value)
    assert NAME.encode() not in b"".join(transport.heard)
    assert NAME in caplog.text  # the site's own log says which file it is
