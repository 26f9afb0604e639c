"""MOCHA at the stationary points of Equation 1, by linear algebra in NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from medfed.personalize.local import Local
from medfed.personalize.mocha import MOCHA, relation
from tests.references.pairing import assert_same, run_on_minibatches
from tests.references.quadratics import CLIENTS, FEATURES, Quadratics, own_models


def precision(w: np.ndarray, smoothing: float) -> np.ndarray:
    gram = w @ w.T
    gram = gram + smoothing**2 * np.trace(gram) / CLIENTS * np.eye(CLIENTS)
    root = scipy.linalg.sqrtm(gram).real
    return np.linalg.inv(root / np.trace(root))


def test_comes_to_a_stationary_point_of_both_blocks():
    """W minimises at the M of W: of all w_i together, one linear system."""
    problem, ridge = Quadratics(), 0.2
    method = MOCHA(strength=0.05, ridge=ridge, smoothing=0.5)
    w = own_models(problem.run(method, 150, steps=8, lr=0.2))
    m = precision(w, 0.5)
    system = np.kron(2 * 0.05 * m + 2 * ridge * np.eye(CLIENTS), np.eye(FEATURES))
    system += scipy.linalg.block_diag(*problem.hessians)
    best = np.linalg.solve(system, problem.linear.ravel()).reshape(CLIENTS, FEATURES)
    assert np.abs(w - best).max() < 1e-6
    alone = np.linalg.solve(problem.hessians, problem.linear[..., None])[..., 0]
    assert np.abs(w - alone).max() > 0.05
    assert np.abs(m - np.diag(np.diag(m))).max() > 0.1  # clients are related


def test_the_relation_minimises_the_trace():
    """Over random covariances of trace 1 none has a smaller tr(W M W^T)."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(CLIENTS, 6))
    found = relation(torch.tensor(w), 1e-6).numpy()
    assert np.trace(found) == pytest.approx(1.0)
    least = np.trace(np.linalg.solve(found, w @ w.T))
    assert least == pytest.approx(np.trace(scipy.linalg.sqrtm(w @ w.T).real) ** 2, rel=1e-6)
    for _ in range(200):
        root = rng.normal(size=(CLIENTS, CLIENTS))
        other = root @ root.T / np.trace(root @ root.T)
        assert np.trace(np.linalg.solve(other, w @ w.T)) > least


def test_without_coupling_it_is_local():
    limit, _ = run_on_minibatches(MOCHA(strength=0.0))
    alone, _ = run_on_minibatches(Local())
    for client in alone.ids:
        assert_same(limit.personal_model(client), alone.personal_model(client), 1e-12)
