"""What holds for every task: evaluation leaves no trace, and central training works."""

from __future__ import annotations

import hashlib
import math
import random

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn import linear_model
from sklearn.metrics import r2_score, roc_auc_score, root_mean_squared_error
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader

from medfed.common.scores import worst_value
from medfed.models.classification import RiskTask
from medfed.models.networks.small import LinearRegression, LogisticRegression
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask
from medfed.models.survival import SurvivalTask
from medfed.standalone.errors import ConfigError
from tests.models.tiny import SGD, make_batch, make_samples, make_task
from tests.sweeps import sweep

# Facts about a tiny run on a small machine, not about the task.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
]


def state_hash(task: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in task.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def test_names_are_those_of_the_network(kind):
    task = make_task(kind)
    assert list(task.state_dict()) == [f"network.{n}" for n in task.network.state_dict()]


def test_evaluate_gives_the_declared_metrics(kind):
    task = make_task(kind)
    scores = task.evaluate([make_batch(kind)])
    assert tuple(scores) == task.metric_names
    assert task.selection[0] in scores
    assert all(isinstance(v, float) and math.isfinite(v) for v in scores.values())


@sweep("training", [True, False])
def test_evaluate_leaves_no_trace(kind, training):
    task = make_task(kind).train(training)
    frozen = next(m for m in task.network.modules() if not list(m.children()))
    frozen.train(not training)
    loader = DataLoader(make_samples(kind), batch_size=8, shuffle=True)
    before = state_hash(task), [m.training for m in task.modules()], set(vars(task))
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    task.evaluate(loader)
    task.predict(make_batch(kind))
    assert (state_hash(task), [m.training for m in task.modules()], set(vars(task))) == before
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.array_equal(np.random.get_state()[1], streams[2])
    assert all(p.grad is None for p in task.parameters())


def test_evaluate_restores_the_flags_after_an_error(kind):
    task = make_task(kind).train()
    with pytest.raises(KeyError):
        task.evaluate([{"image": make_batch(kind)["image"]}])
    assert task.network.training
    assert torch.is_grad_enabled()


def test_evaluate_of_nothing_is_nan(kind):
    assert all(math.isnan(v) for v in make_task(kind).evaluate([]).values())


@sweep("bad", [math.nan, math.inf])
def test_one_prediction_that_is_not_finite_makes_every_metric_the_worst(kind, bad):
    task, batch = make_task(kind), make_batch(kind)
    good, forward = task.evaluate([batch]), task.forward
    count = [0]

    def once(image):
        logits = forward(image).clone()
        count[0] += 1
        if count[0] == 2:
            logits.flatten()[0] = bad
        return logits

    task.forward = once
    scores = task.evaluate([batch, batch, batch])
    assert scores == {name: worst_value(name) for name in good}
    assert scores["loss"] == math.inf
    count[0] = 9  # the next evaluation is as good as the first
    assert task.evaluate([batch]) == good


def test_an_infinite_loss_makes_every_metric_the_worst():
    task = make_task("regression")
    torch.nn.init.constant_(task.network.linear.weight, 1e30)  # finite, but not its square
    batch = make_batch("regression")
    assert task.forward(batch["image"]).isfinite().all()
    scores = task.evaluate([batch])
    assert scores == {"loss": math.inf, "rmse": math.inf, "mae": math.inf, "r2": -math.inf}


def test_what_the_data_leave_undefined_stays_so_when_the_model_fails():
    task, batch = make_task("classification"), make_batch("classification")
    batch["label"] = torch.ones_like(batch["label"])
    undefined = [n for n, v in task.evaluate([batch]).items() if math.isnan(v)]
    assert undefined == ["balanced_accuracy", "auroc", "specificity"]
    torch.nn.init.constant_(next(task.network.parameters()), math.nan)
    failed = task.evaluate([batch])
    assert [n for n, v in failed.items() if math.isnan(v)] == undefined
    assert (failed["loss"], failed["accuracy"], failed["brier"]) == (math.inf, 0.0, 1.0)


def test_loss_is_a_scalar_with_gradients(kind):
    task = make_task(kind)
    loss = task.loss(make_batch(kind))
    loss.backward()
    assert loss.shape == ()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.network.parameters())


def test_predict_gives_probabilities(kind):
    probs = make_task(kind).predict(make_batch(kind))
    assert not probs.requires_grad
    if kind == "regression":
        assert probs.shape == (8, 1)
        return
    assert ((probs >= 0) & (probs <= 1)).all()
    if kind not in ("segmentation", "classes"):
        assert torch.allclose(probs.sum(1), torch.ones(8))


def test_sliding_window_of_a_pointwise_network_is_the_network():
    net = torch.nn.Conv2d(2, 2, 1)
    task = SegmentationTask(net, SGD, regions=["a", "b"], patch_size=[16, 16])
    whole = SegmentationTask(net, SGD, regions=["a", "b"])
    for size in (11, 16, 40):  # smaller than a window, equal, larger
        batch = make_batch("segmentation", 2, size)
        assert torch.allclose(task.predict(batch), whole.predict(batch), atol=1e-6)


def test_volumes():
    net = torch.nn.Conv3d(1, 1, 3, padding=1)
    task = SegmentationTask(net, SGD, regions=["a"], patch_size=[8, 8, 8])
    label = torch.zeros(1, 1, 12, 10, 9)
    label[..., 3:7, 3:7, 3:7] = 1
    scores = task.evaluate([{"image": label, "label": label, "case": torch.tensor([4])}], test=True)
    assert set(scores) - set(task.metric_names) == {"hd95", "hd95/a", "nsd", "nsd/a"}


@pytest.mark.parametrize("kind", ["risk", "regression"])
def test_penalty_trains_but_is_not_measured(kind):
    plain, penalised = make_task(kind), make_task(kind, l2=0.5)
    for task in (plain, penalised):
        torch.nn.init.constant_(task.network.linear.weight, 2.0)
        torch.nn.init.constant_(task.network.linear.bias, 3.0)
    batch = make_batch(kind)
    gap = penalised.loss(batch) - plain.loss(batch)
    assert gap.item() == pytest.approx(0.25 * 5 * 4.0, rel=1e-5)
    assert penalised.evaluate([batch]) == plain.evaluate([batch])


def test_risk_reaches_sklearns_coefficients():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, generator=g, dtype=torch.float64)
    y = (x @ torch.tensor([1.0, -2.0, 0.5, 0.0]).double() + torch.randn(80, generator=g) > 0).long()
    task = RiskTask(LogisticRegression(4).double(), SGD, l2=0.1)
    lbfgs = torch.optim.LBFGS(
        task.network.parameters(), max_iter=200, line_search_fn="strong_wolfe",
        tolerance_grad=1e-10, tolerance_change=1e-14,
    )  # fmt: skip

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = task.loss({"image": x, "label": y})
        loss.backward()
        return loss

    lbfgs.step(closure)
    # scikit-learn minimises C * sum(losses) + |w|^2 / 2.
    reference = linear_model.LogisticRegression(C=1 / (80 * 0.1), tol=1e-10, max_iter=1000).fit(
        x, y
    )
    assert np.allclose(task.network.linear.weight.detach(), reference.coef_, atol=1e-5)
    assert np.allclose(task.network.linear.bias.detach(), reference.intercept_, atol=1e-5)


@pytest.mark.parametrize("link", ["logit", "probit", "identity", "log"])
def test_links_reach_the_maximum_of_their_likelihoods(link):
    """By SciPy, of the density of the outcome itself."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    eta = x @ [0.8, -0.6, 0.3] + 0.4
    two, square = link in ("logit", "probit"), link == "identity"
    y = rng.normal(eta) if square else rng.poisson(np.exp(eta)).astype(float)
    if two:
        y = (rng.normal(size=80) < eta).astype(int)
        task = RiskTask(LogisticRegression(3, link=link).double(), SGD)
    else:
        loss = None if square else "poisson"
        task = RegressionTask(LinearRegression(3, link=link).double(), SGD, loss=loss)

    def surprise(w):
        z = x @ w[:3] + w[3]
        if two:
            p = stats.norm.cdf(z) if link == "probit" else 1 / (1 + np.exp(-z))
            return -stats.bernoulli.logpmf(y, p).mean()
        if square:
            return -stats.norm.logpdf(y, z).mean()
        return -stats.poisson.logpmf(y, np.exp(z)).mean()

    best = optimize.minimize(surprise, np.zeros(4), method="BFGS", options={"gtol": 1e-8}).x
    batch = {"image": torch.tensor(x), "label": torch.tensor(y)}
    with torch.no_grad():
        task.network.linear.weight.copy_(torch.tensor(best[None, :3]))
        task.network.linear.bias.copy_(torch.tensor(best[3:]))
    before = task.loss(batch)
    before.backward()
    assert max(float(p.grad.abs().max()) for p in task.network.parameters()) < 1e-5
    with torch.no_grad():
        task.network.linear.bias.add_(0.1)
        after = task.loss(batch)
    rise = surprise([*best[:3], best[3] + 0.1]) - surprise(best)
    scale = 2 if square else 1  # the squared error is twice the surprise, but for a constant
    assert float(after - before.detach()) == pytest.approx(scale * rise, rel=1e-6)


def test_links_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="link=probit is for two classes"):
        LogisticRegression(3, 4, link="probit")
    task = RegressionTask(LinearRegression(3, link="log"), SGD, loss="poisson")
    with pytest.raises(ValueError, match="poisson is for counts, and an outcome is negative"):
        task.criterion(torch.ones(2, 1), torch.tensor([1.0, -1.0]))


def test_regression_reaches_ridge_regression():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, generator=g, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]).double() + 3 + torch.randn(80, generator=g)
    task = RegressionTask(LinearRegression(4).double(), SGD, l2=0.1)
    lbfgs = torch.optim.LBFGS(
        task.network.parameters(), max_iter=200, line_search_fn="strong_wolfe",
        tolerance_grad=1e-12, tolerance_change=1e-16,
    )  # fmt: skip

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = task.loss({"image": x, "label": y})
        loss.backward()
        return loss

    lbfgs.step(closure)
    # scikit-learn minimises sum of squares + alpha |w|^2.
    reference = linear_model.Ridge(alpha=80 * 0.1 / 2, tol=1e-12).fit(x, y)
    assert np.allclose(task.network.linear.weight.detach(), reference.coef_, atol=1e-8)
    assert np.allclose(task.network.linear.bias.detach(), reference.intercept_, atol=1e-8)


def test_an_outcome_in_standard_units_is_learnt_as_one_that_was_standardised_before():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=g, dtype=torch.float64)
    days = 450 + 60 * (x @ torch.tensor([1.0, -2.0, 0.5]).double() + torch.randn(60, generator=g))
    scaler = StandardScaler().fit(days[:, None])
    plain, scaled = (LinearRegression(3, spread=0.5).double() for _ in range(2))
    scaled.load_state_dict(plain.state_dict())
    scale = [scaler.mean_.item(), scaler.scale_.item()]
    tasks = RegressionTask(plain, SGD), RegressionTask(scaled, SGD, scale=scale)
    labels = torch.from_numpy(scaler.transform(days[:, None])).squeeze(1), days
    for task, label in zip(tasks, labels, strict=True):
        optimizer = torch.optim.SGD(task.network.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            task.loss({"image": x, "label": label}).backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    # Predictions and metrics are in days; the loss is in deviations.
    found = tasks[1].predict({"image": x})
    back = scaler.inverse_transform(tasks[0].predict({"image": x}).numpy())
    np.testing.assert_allclose(found, back, rtol=1e-5)
    measured = tasks[1].evaluate([{"image": x, "label": days}])
    assert measured["rmse"] == pytest.approx(root_mean_squared_error(days, back), rel=1e-5)
    assert measured["r2"] == pytest.approx(r2_score(days, back), rel=1e-5)
    assert measured["loss"] == pytest.approx((measured["rmse"] / scale[1]) ** 2, rel=1e-5)
    (cases,) = {len(tasks[1].measured([{"image": x, "label": days}]).cases())}
    assert cases == 60


def test_outcomes_and_times_stand_among_the_cases_as_in_the_table():
    days = [-4.84, 12.3, 1e-7, 123456.7]
    outcomes = RegressionTask(LinearRegression(1), SGD)
    rows = outcomes.measured([{"image": torch.ones(4, 1), "label": torch.tensor(days)}]).cases()
    assert [row["label"] for row in rows] == days
    # An event at the horizon itself is one by the horizon.
    times, risks = [3.1, 12.3, 12.4, 20.0], [4.0, 3.0, 2.0, 1.0]
    line = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(line.weight)
    task = SurvivalTask(line, SGD, cuts=(12.3, 20.0), loss="cox", horizon=12.3)
    label = torch.stack([torch.tensor(times), torch.ones(4)], 1)
    meter = task.measured([{"image": torch.tensor(risks)[:, None], "label": label}])
    assert [row["time"] for row in meter.cases()] == times
    assert meter.compute()["auroc/12.3"] == roc_auc_score([t <= 12.3 for t in times], risks) == 1


def test_a_loss_of_ones_own_is_given_the_outcome_in_its_unit():
    seen = []

    def loss(prediction, outcome):
        seen.append((prediction.detach(), outcome))
        return (prediction - outcome).square().mean()

    task = RegressionTask(LinearRegression(2), SGD, loss=loss, scale=[450, 60])
    task.loss({"image": torch.zeros(3, 2), "label": torch.tensor([400.0, 450.0, 500.0])})
    assert [t.tolist() for t in seen[-1]] == [[450.0] * 3, [400.0, 450.0, 500.0]]


@sweep("scale", [[450, 0], [450, -1], [450], [math.nan, 1], [1, 2, 3], ["a", 1]])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ConfigError, match="must be a mean and a deviation above 0"):
        RegressionTask(LinearRegression(2), SGD, scale=scale)


def test_a_regression_refuses_classes_and_images():
    task = make_task("regression")
    with pytest.raises(ValueError, match="one continuous outcome per sample"):
        task.loss({"image": torch.ones(3, 5), "label": torch.tensor([0, 1, 1])})
    with pytest.raises(ValueError, match="one continuous outcome per sample"):
        task.criterion(torch.ones(3, 2), torch.ones(3))


def test_personal_can_be_overridden():
    assert make_task("classification").personal == ("class_layers.*",)
    assert make_task("classification", personal=["features.norm5.*"]).personal == (
        "features.norm5.*",
    )


@sweep(
    ("build", "words"),
    [
        (lambda: make_task("classification", loss="focl"), "choose cross_entropy or focal"),
        (lambda: make_task("classification", class_weights=[1, 2, 3]), "3 class_weights"),
        (lambda: make_task("classification", selection=["acuracy", "max"]), "did you mean acc"),
        (lambda: make_task("risk", selection=["loss", "lowest"]), r"must be \[loss,min\]"),
        (lambda: make_task("risk", selection=["loss", "max"]), r"must be \[loss,min\]"),
        (lambda: make_task("risk", selection=["auroc", "min"]), r"must be \[auroc,max\]"),
        (lambda: make_task("regression", selection=["r2", "min"]), r"must be \[r2,max\]"),
        (lambda: make_task("risk", selection=["auroc"]), r"=\[auroc\] must be \[auroc,max\]"),
        (lambda: make_task("risk", l2=-1.0), "must not be negative"),
        (lambda: make_task("regression", l2=-1.0), "must not be negative"),
        (lambda: make_task("regression", selection=["rsme", "min"]), "did you mean rmse"),
        (lambda: make_task("segmentation", regions=[]), "names of its regions"),
        (lambda: make_task("segmentation", overlap=1.0), r"must be in \[0, 1\)"),
    ],
)
def test_bad_options(build, words):
    with pytest.raises(ConfigError, match=words):
        build()


@pytest.mark.parametrize("exclusive", [True, False, None])
def test_classes_are_exclusive_where_the_data_say_so(exclusive):
    found = SegmentationTask(torch.nn.Conv2d(2, 3, 1), SGD, regions=["a", "b"], exclusive=exclusive)
    assert found.activation == ("softmax" if exclusive else "sigmoid")


def test_softmax_of_regions_that_overlap_is_refused():
    with pytest.raises(ConfigError, match="the regions of these data overlap; choose auto"):
        make_task("segmentation", activation="softmax", exclusive=False)
    with pytest.raises(ConfigError, match=r"model.activation.*softmx.*did you mean softmax"):
        make_task("segmentation", activation="softmx")
