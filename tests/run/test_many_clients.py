"""Tables, sentences and pictures of very many clients show the ends and say what is left out."""

from __future__ import annotations

import math

import numpy as np
import torch

from medfed.common.scores import Record, failure_sentences, undefined_sentences
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.functional.mixing import (
    cosine_affinity,
    coupling,
    laplacian,
    spread_coupling,
    spread_rows,
)
from medfed.personalize.client_pictures import draw_graph, draw_matrix, draw_shares
from medfed.run.pictures import bytes_per_client, metric_curves
from medfed.run.results import ends_of, metric_table

CLIENTS = [f"c{i}" for i in range(300)]


def test_curves_become_bands():
    history = [Record(n, c, {"iou": i / 300}) for n in range(3) for i, c in enumerate(CLIENTS)]
    axes = metric_curves(history, "iou").axes[0]
    assert len(axes.lines) == 1
    low, high = axes.collections[-1].get_paths()[0].vertices[:, 1].min(), 0.75 * 299 / 300
    assert np.isclose(low, 0.25 * 299 / 300)
    assert np.isclose(axes.collections[-1].get_paths()[0].vertices[:, 1].max(), high)


def test_bytes_are_of_the_clients_with_most():
    ledger = Ledger(Entry(0, "fit", c, "up", "w", 10 + i, 40) for i, c in enumerate(CLIENTS))
    axes = bytes_per_client(ledger).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()][:2] == ["c299", "c298"]
    assert "the 20 of 300 clients with most bytes; the others down to 10" in axes.get_xlabel()


def test_a_table_has_the_best_and_the_worst():
    metrics = {c: {"iou": i / 300, "loss": 1.0} for i, c in enumerate(CLIENTS)}
    metrics["c7"]["iou"] = math.nan
    best, worst = ends_of(metrics, "iou", "max")
    assert (best[0], worst[-1], len(best), len(worst)) == ("c299", "c0", 10, 10)
    assert ends_of({"a": {"iou": 1.0}}, "iou") == (["a"], [])
    over = {n: {"mean": 0.5, "sd": 0.1, "worst": 0.0} for n in ("iou", "loss")}
    table = metric_table(
        {
            "name": "x",
            "algorithm": "fedavg",
            "selection": ["iou", "max"],
            "rounds": 1,
            "selected_round": 0,
            "clients": metrics,
            "federation": over,
        }
    )
    cells = list(table.columns[0].cells)
    assert "… 280 more, see metrics.csv" in cells
    assert len(cells) == 24


def test_sentences_name_some():
    lost = {c: {"loss": math.inf} for c in CLIENTS}
    told = failure_sentences(lost, "test")
    assert len(told) == 11
    assert told[-1] == "The same holds for 290 more clients."
    (one,) = undefined_sentences({c: {"auroc": math.nan} for c in CLIENTS}, "test")
    assert "c19 and 280 more leave auroc undefined" in one


def test_pictures_of_methods_stay_of_a_size():
    edges = torch.tensor([[i, i + 1] for i in range(299)])
    graph = {"edges": edges, "distance": torch.zeros(299, dtype=torch.float64)}
    shares = {c: torch.tensor(0.5) for c in CLIENTS}
    for figure in (
        draw_graph(CLIENTS, graph),
        draw_shares(shares, "x"),
        draw_matrix(CLIENTS, torch.rand(300, 300), "x"),
    ):
        assert max(figure.get_size_inches()) <= 20


def test_the_coupling_of_rows_is_that_of_the_laplacian():
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 9, (40, 5), generator=random).double()
    counts[3] = 0  # has told nothing
    members = torch.rand(40, 3, generator=random)
    dense = coupling(laplacian(cosine_affinity(counts)), members, 0.3)
    torch.testing.assert_close(spread_coupling(spread_rows(counts), members, 0.3), dense)
