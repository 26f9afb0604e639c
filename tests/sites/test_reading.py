"""What a person reads at a hospital is whole, at any width and in a pipe, from the first second."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medfed.commands.main import main
from medfed.common.console import Terminal, say, wide_console
from medfed.common.tables import Table
from medfed.sites import installed, site_folder, status
from medfed.sites.agreement import Agreed
from medfed.sites.deploying import encoded, start_site
from medfed.sites.status import SiteState, Status, Traffic
from medfed.sites.wire import Hello, Reply
from medfed.sites.words import words_for
from medfed.standalone.errors import SiteError
from tests.sites.tables import EXPERIMENT, SITES, write_table

WIDTHS = {"pipe": None, "80": 80, "60": 60}
_PARTS = re.compile(r"[│─━┃┏┓┡┩┗┛└┘╇┴┼├┤]|\x1b\[[\d;]*m")


def words_of(text: str) -> set[str]:
    """The words of a text, without the lines of tables and the colons of their heads."""
    return {word.strip(":,") for word in _PARTS.sub(" ", text).split()}


@pytest.fixture
def wide(monkeypatch):
    """Makes the output a terminal of a width, or a pipe."""

    def made(width):
        for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1"), ("COLUMNS", str(width))):
            monkeypatch.setenv(name, value) if width else monkeypatch.delenv(name, raising=False)

    return made


WORDS = st.lists(st.text("abc0", min_size=1, max_size=25), min_size=1, max_size=6).map(" ".join)
ROWS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(WORDS, min_size=n, max_size=n), min_size=2, max_size=4)
)


@given(ROWS, st.integers(30, 160), st.booleans())
def test_a_table_cuts_no_word(rows, width, prose):
    head = [f"head{n} {text}" for n, text in enumerate(rows[0])]
    table = Table.of(head, rows[1:], prose=range(len(head)) if prose else ())
    console = Terminal(width=width, file=None, record=True, quiet=False)
    with console.capture() as captured:
        console.print(table.printed("a title [of] words"))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    asked = " ".join([*head, *(" ".join(row) for row in rows[1:]), "a title [of] words"])
    assert words_of(asked) <= words_of("\n".join(lines))


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The files of a hospital with a long name that is to be checked."""
    folder = tmp_path_factory.mktemp("bern")
    write_table(folder / "ours.csv", ("Bern",))
    (folder / "site.yaml").write_text("site: Bern\ndata:\n  path: ours.csv\n")
    main(["deploy", f"dry_run={folder}", f"sites=[{','.join(SITES)}]", *EXPERIMENT])
    return f"agreed={folder / 'agreed.json'}", f"local={folder / 'site.yaml'}"


def test_every_word_of_the_check_is_there(checked, wide, capsys):
    said = {}
    for name, width in WIDTHS.items():
        wide(width)
        capsys.readouterr()
        main(["site", "check", *checked])
        said[name] = words_of(capsys.readouterr().out)
    assert said["80"] == said["60"] == said["pipe"]
    for part in ("preprocessing", "sketch", "personal"):  # what would leave
        assert words_of(words_for("parts")[part]) <= said["60"]
    assert not [word for word in said["60"] if "…" in word]


@pytest.fixture
def ran(tmp_path) -> Path:
    """The folder of a run that a site has left with a long reason."""
    traffic = Traffic()
    for kind in words_for("requests"):
        traffic.add("university_hospital_of_the_north", kind, 123_456_789, 12)
    why = "it did not answer within 600 seconds, and its last error was of a kind with a long name"
    now = Status(12, 3, "trains", "2026-01-01 10:00:00")
    now.sites["university_hospital_of_the_north"] = SiteState(why, "2026-01-01 10:00:00", 2, 0.5)
    now.sites["va"] = SiteState("there", "2026-01-01 10:00:00", 3)
    status.keep(now, traffic, site_folder.RunFolder(tmp_path))
    return tmp_path


@pytest.mark.parametrize("width", WIDTHS)
def test_every_word_of_the_status_is_there(width, ran, wide, capsys):
    wide(WIDTHS[width])
    main(["site", "status", f"run={ran}"])
    said = words_of(capsys.readouterr().out)
    kept = json.loads((ran / "status.json").read_text())["sites"]
    texts = [*kept, *(each["state"] for each in kept.values()), *words_for("requests").values()]
    for text in (*texts, "Round 4 of 12: trains", "123.5 MB"):
        assert words_of(text) <= said, text


ENDS = {
    "finished": (None, "finished"),
    "stopped": (SiteError("Bern: it is [red]gone."), "stopped (Bern: it is [red]gone)"),
    "interrupted": (KeyboardInterrupt(), "stopped (KeyboardInterrupt)"),
    "by FLARE": (SystemExit("FLARE ends the job"), "stopped (FLARE ends the job)"),
    "unexpected": (ValueError("born 1957"), "stopped (ValueError)"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_status_tells_the_end(end, tmp_path, capsys):
    error, words = ENDS[end]
    run = site_folder.RunFolder(tmp_path)
    try:
        with status.ended(Status(5, 4, "tests"), Traffic(), run):
            if error is not None:
                raise error
    except (SiteError, KeyboardInterrupt, SystemExit, ValueError):  # raised again
        pass
    main(["site", "status", f"run={tmp_path}"])
    assert f"Round 5 of 5: {words}, since 2" in " ".join(capsys.readouterr().out.split())


def hello(site) -> tuple[str, str]:
    reply = Reply.from_bytes(site.answer(Hello("Basel", "s").to_bytes()))
    return reply.status, reply.reason


def test_the_log_begins_with_the_process_and_refusals_have_a_file(tmp_path):
    agreed = Agreed(SITES, EXPERIMENT[:-2])
    (tmp_path / "medfed.yaml").write_text("site: Basel\nagreed: []\ndata: {path: ours.csv}\n")
    folder, local = tmp_path / "medfed", tmp_path / "medfed.yaml"
    record = agreed.record()
    asked = encoded(record)
    assert hello(start_site(local, asked, "Basel", print, print)) == ("refused", "agreed")
    first, second = (folder / "log.txt").read_text().splitlines()[:2]
    assert first.endswith(f"INFO Starts with medfed {agreed.medfed}, code {installed.code()}.")
    refused = (folder / "refusals.txt").read_text()
    assert refused.startswith(second)
    assert f"its agreement is {agreed.digest}" in refused
    other = encoded({**record, "code": "0" * 64})
    assert hello(start_site(local, other, "Basel", print, print)) == ("refused", "code")
    assert "code 000000000000, and this is" in (folder / "refusals.txt").read_text()
    asked = encoded({**record, "overrides": ["rounds=x"]})
    local.write_text("site: Basel\ndata: {path: ours.csv}\n")
    assert hello(start_site(local, asked, "Basel", print, print))[0] == "failed"
    assert (folder / "log.txt").read_text().count("INFO Starts with") == 3
    assert "cannot start" in (folder / "log.txt").read_text()
    assert "cannot start" not in (folder / "refusals.txt").read_text()


def test_letters_between_colons_are_no_picture(capsys):
    """A fingerprint holds such letters, and a name may."""
    say(wide_console(), "SHA256:FE:CD:89:AB")
    wide_console().print(Table.of(["a:cd:"], [["x:bus:y"]]).printed("t:cd:"))
    said = capsys.readouterr().out
    assert all(word in said for word in ("SHA256:FE:CD:89:AB", "a:cd:", "x:bus:y", "t:cd:"))
