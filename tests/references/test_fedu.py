"""FedU against Algorithm 1 in NumPy, on minibatches, and the minimum of its objective."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from medfed.federation.budget import LocalBudget
from medfed.federation.reference import onboarded_client, run_onboarding
from medfed.personalize.fedu import FedU
from medfed.personalize.local import Local
from medfed.personalize.similarity import SimilarityGraph
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, models, run
from tests.references.linear_net import ALL, Model, gradient
from tests.references.one_layer import Quadratics, personal, spread, vector
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches

RING, COMPLETE = (SimilarityGraph(kind=k) for k in ("ring", "complete"))
# Options of the method, options of the run.
CASES = {
    "ring": ({"strength": 0.3, "graph": RING}, {}),
    "complete": ({"strength": 0.5, "graph": COMPLETE}, {"fraction": 0.5, "rounds": 7}),
    "momentum": ({"strength": 0.1, "graph": RING}, {"momentum": 0.9, "lr": 0.01}),
    "too-strong": ({"strength": 50.0, "graph": RING}, {"fraction": 0.5, "rounds": 7}),
}


def edges(kind: str, n: int) -> np.ndarray:
    """a_kl."""
    a = np.ones((n, n)) - np.eye(n)
    if kind == "ring":
        a = np.array([[float((i - j) % n in (1, n - 1)) for j in range(n)] for i in range(n)])
    return a


def fedu(p: Minibatches, method: FedU) -> list[Model]:
    """All w_k after the last round; sums over neighbours, client by client."""
    count, seen = len(p.batches), set()
    own, a = [dict(p.initial) for _ in range(count)], edges(method.graph.kind, count)
    reach = p.lr * sum(sum(p.momentum**j for j in range(k)) for k in range(1, p.steps + 1))
    for cohort in p.cohorts:
        seen |= set(cohort)
        known = sorted(seen)
        for n in cohort:
            w, velocity = own[n], {k: np.zeros_like(p.initial[k]) for k in ALL}
            for batch in islice(p.batches[n], p.steps):
                g = gradient(w, *batch)
                velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
                w = {k: w[k] - p.lr * velocity[k] for k in ALL}
            own[n] = w
        part = a[np.ix_(known, known)]
        largest = np.linalg.eigvalsh(np.diag(part.sum(0)) - part).max()
        step = min(reach * method.strength, 1 / largest if largest > 1e-12 else 0)
        drawn = {
            n: {k: own[n][k] - step * sum(a[n, m] * (own[n][k] - own[m][k]) for m in known)
                for k in ALL}
            for n in cohort
        }  # fmt: skip
        for n, w in drawn.items():
            own[n] = w
    return own


@pytest.mark.parametrize("case", CASES)
def test_equals_algorithm_1(case):
    options, changes = CASES[case]
    federation, problem = run_on_minibatches(FedU(**options), **changes)
    for client, expected in zip(federation.ids, fedu(problem, FedU(**options)), strict=True):
        assert_same(federation.personal_model(client), expected, 1e-10)
        assert_same(federation.server[f"model/{client}"], expected, 1e-10)


def test_nears_the_minimum_of_the_objective_in_which_each_edge_counts_once():
    """sum f_k + (lambda/2) sum over edges, by a linear system; off by about the step."""
    q, strength = spread(), 0.4
    a = edges("ring", 5)
    laplacian = np.diag(a.sum(0)) - a
    whole = np.zeros((20, 20))
    for k in range(5):
        whole[4 * k : 4 * k + 4, 4 * k : 4 * k + 4] = q.a[k]
    whole += strength * np.kron(laplacian, np.eye(4))
    best = np.linalg.solve(whole, q.b.ravel()).reshape(5, 4)
    method, off = FedU(strength=strength, graph=RING), []
    for lr, rounds in ((0.4, 25), (0.1, 80)):
        off.append(np.abs(personal(q.run(method, rounds, lr=lr)) - best).max())
    assert 3 < off[0] / off[1] < 6
    assert off[1] < 0.05 < np.abs(best - best.mean(0)).max()


def test_no_tie_is_local_training():
    free = FedU(strength=0.0)
    assert gap(run(free, momentum=0.9), run(Local(), momentum=0.9)) < 1e-14


def test_the_strongest_tie_in_a_complete_graph_is_the_mean():
    federation = run(FedU(strength=1e6, graph=COMPLETE))
    rows = models(federation)
    assert rows == pytest.approx(np.tile(rows[0], (4, 1)), abs=1e-14)


def test_sketches_make_the_graph_and_similar_edges_weigh_more():
    q = spread()
    for weighted in (False, True):
        graph = SimilarityGraph(neighbours=1, weighted=weighted, sketch="label")
        federation = q.run(FedU(strength=0.2, graph=graph), 2)
        known = federation.server["graph"]
        a = federation.algorithm.weights_of(federation.server, federation.ids).numpy()
        assert (a == a.T).all()
        assert (a > 0).sum() == 2 * len(known["edges"])
        assert (len(set(a[a > 0].tolist())) > 1) == weighted
        assert federation.pictures()["graph"].axes


def test_a_sketch_of_the_model_is_of_all_where_nothing_is_personal():
    federation = spread().run(FedU(graph=SimilarityGraph(sketch="model", neighbours=2)), 1)
    sketch = next(iter(federation.server["sketches"].values()))
    assert sketch.shape == (4,)
    assert float(sketch.norm()) > 0


def test_an_onboarded_client_is_tied_to_its_neighbours():
    q, strength = spread(), 0.3
    graph = SimilarityGraph(neighbours=2, sketch_size=2)
    federation = q.run(FedU(strength=strength, graph=graph), 3)
    new = Quadratics.drawn(np.array([[1.0, 0.5, -1.0, 0.2]]))
    client = onboarded_client(federation, new.data[0])
    client.trainer.budget = LocalBudget(steps=80)
    message, ledger = run_onboarding(federation, client)
    model = federation.algorithm.onboard(client, message)
    known = np.stack([vector(federation.server[f"model/{c}"]) for c in federation.ids])
    pairs = [(i, j) for i in range(5) for j in range(i)]
    found = [
        (i, j) for i, j in pairs
        if np.allclose(vector(message.parts["model"]), (known[i] + known[j]) / 2, atol=1e-12)
    ]  # fmt: skip
    assert len(found) == 1
    near = known[list(found[0])]
    expected = np.linalg.solve(
        new.a[0] + 2 * strength * np.eye(4), new.b[0] + strength * near.sum(0)
    )
    assert vector(model) == pytest.approx(expected, abs=1e-10)
    assert ledger.total(direction="up") > 0


def test_bad_values_are_named():
    with pytest.raises(ConfigError, match=r"algorithm\.strength must not be negative") as caught:
        FedU(strength=-1.0)
    assert_one_sentence(caught.value)
