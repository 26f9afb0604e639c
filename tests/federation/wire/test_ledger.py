import csv
import io

import torch

from medfed.federation.wire.ledger import Entry, Ledger

ENTRIES = [
    Entry(0, "fit", "a", "down", "shared", 10, 40),
    Entry(0, "fit", "a", "up", "shared", 7, 28),
    Entry(0, "fit", "b", "up", "shared", 5, 20),
    Entry(1, "fit", "a", "up", "sketch", 3, 12),
]


def test_totals_agree_however_they_are_grouped():
    ledger = Ledger(ENTRIES)
    assert ledger.total() == 25
    assert ledger.total(client="a", direction="up") == 10
    assert ledger.total(round=2) == 0
    assert ledger.totals("round") == {(0,): 22, (1,): 3}
    assert ledger.totals("client", "part") == {
        ("a", "shared"): 17,
        ("b", "shared"): 5,
        ("a", "sketch"): 3,
    }
    for fields in (("phase",), ("direction",), ("round", "client", "part"), Entry._fields):
        assert sum(ledger.totals(*fields).values()) == 25


def test_savings_compare_with_fp32():
    ledger = Ledger([Entry(0, "fit", "a", "up", "shared", 10, 40), *ENTRIES[2:]])
    assert ledger.savings(client="a", part="shared") == 4.0
    assert ledger.savings() == (40 + 20 + 12) / (10 + 5 + 3)
    assert ledger.savings(client="nobody") == 1.0
    assert Ledger().savings() == 1.0


def test_csv_holds_every_entry_in_order():
    rows = list(csv.reader(io.StringIO(Ledger(ENTRIES).to_csv())))
    assert rows[0] == list(Entry._fields)
    assert rows[1:] == [[str(v) for v in e] for e in ENTRIES]


def test_state_survives_a_checkpoint(tmp_path):
    torch.save(Ledger(ENTRIES).state_dict(), tmp_path / "ledger.pt")
    restored = Ledger([Entry(9, "x", "y", "up", "z", 1, 4)])
    restored.load_state_dict(torch.load(tmp_path / "ledger.pt", weights_only=True))
    assert restored.entries == ENTRIES
    restored.add(ENTRIES[0])
    assert restored.total() == 35
