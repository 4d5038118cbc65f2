"""Names, sides and spreads of clients' metrics, by hand."""

from __future__ import annotations

import math

import pytest
from torchmetrics import MeanSquaredError
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import BinaryAUROC

from lightning_fed.core.direction import direction
from lightning_fed.evaluation.names import public_names, short_name
from lightning_fed.evaluation.results import ClientEvaluations, Evaluation, Spread, stated_directions


def clients(values: list[float], examples: list[int] | None = None, name: str = "f1") -> ClientEvaluations:
    sizes = examples or [1] * len(values)
    pairs = zip(values, sizes, strict=True)
    return ClientEvaluations({f"c{i}": Evaluation(0.0, 0.0, n, {name: v}) for i, (v, n) in enumerate(pairs)})


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("f1", "f1"),
        ("val_f1", "f1"),
        ("Validation/F1", "F1"),
        ("test f1 @ 5", "f1_5"),
        ("train_loss", "loss"),
        ("value", "value"),
        ("val", "val"),
        ("trainable", "trainable"),
        ("größe", "größe"),
        ("a,b\n\"c\" '|'", "a_b_c"),
        ("\udc80", "metric"),
        ("", "metric"),
    ],
)
def test_names_lose_their_stage_and_what_loggers_do_not_take(logged: str, name: str) -> None:
    assert short_name(logged) == name


def test_no_two_metrics_have_figures_of_the_same_name() -> None:
    logged = [
        "f1",
        "val_f1",
        "f1!",
        "f1_sd",
        "val_f1_worst",
        "worst",
        "x_worst_decile",
        "x",
        "accuracy",
        "test/loss",
        "%",
        "/",
    ]
    names = public_names(logged)
    assert names["f1"] == "f1"
    assert names["val_f1"] == "val_f1"
    figures = [
        *("loss", "accuracy", "loss_sd", "loss_worst", "loss_worst_decile", "accuracy_sd", "accuracy_worst"),
        *("accuracy_worst_decile", *names.values()),
        *(f"{name}_{figure}" for name in names.values() for figure in ("sd", "worst", "worst_decile")),
    ]
    assert len(set(figures)) == len(figures) == 8 + 4 * len(logged)


def test_names_say_which_side_is_better_only_without_contradiction() -> None:
    higher = ["val_acc", "Accuracy", "f1", "f1_macro", "MulticlassF1Score", "BinaryAUROC", "precision", "recall", "r2"]
    lower = ["loss", "kl_loss", "MSELoss", "error", "MeanSquaredError", "mae", "val/mse", "rmse_kg", "perplexity"]
    assert {direction(name) for name in higher} == {True}
    assert {direction(name) for name in lower} == {False}
    unknown = ["score", "lossless", "f10", "error_recall", "temperature", "r", "macro", "1", "place"]
    assert {direction(name) for name in unknown} == {None}


def test_torchmetrics_says_more_than_a_name() -> None:
    metrics = {"error": BinaryAUROC(), "score": MeanSquaredError(), "mean": MeanMetric(), "number": 1.0}
    assert stated_directions(metrics) == {"error": True, "score": False}
    found = ClientEvaluations(
        {"a": Evaluation(), "b": Evaluation(others={"error": 1.0}, higher_is_better={"error": True})}
    )
    assert found.higher_is_better("error") is True
    assert [clients([1.0], name=name).higher_is_better(name) for name in ("error", "f1", "score")] == [
        False,
        True,
        None,
    ]
    assert (found.higher_is_better("loss"), found.higher_is_better("accuracy")) == (False, True)


def test_the_mean_is_weighted_by_samples_and_the_spread_is_not() -> None:
    found = clients([0.2, 0.6, 1.0], [1, 1, 8])
    spread = found.spread("f1", higher_is_better=True)
    assert spread.mean == pytest.approx(0.88)
    assert spread.sd == pytest.approx(math.sqrt(2 * 0.4**2 / 3))  # around 0.6, the mean with every client counted once
    assert (spread.worst, spread.client) == (0.2, "c0")
    assert found.spread("f1", higher_is_better=False).client == "c2"


@pytest.mark.parametrize(("n", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_worst_decile_is_the_mean_of_a_tenth_of_the_clients_rounded_up(n: int, worst: int) -> None:
    found = clients([float((7 * i) % n) for i in range(n)] if n % 7 else [float(i) for i in range(n)])
    assert found.spread("f1", True).worst_decile == pytest.approx(sum(range(worst)) / worst)
    assert found.spread("f1", False).worst_decile == pytest.approx(n - 1 - (worst - 1) / 2)


def test_an_unknown_side_has_no_worst_client() -> None:
    spread = clients([1.0, 2.0]).spread("f1", None)
    assert (spread.mean, spread.sd, spread.client) == (1.5, 0.5, None)
    assert math.isnan(spread.worst)
    assert math.isnan(spread.worst_decile)


def test_clients_without_a_value_are_left_out() -> None:
    spread = clients([math.nan, 3.0, 1.0], [100, 1, 1]).spread("f1", True)
    assert (spread.mean, spread.sd, spread.worst_decile, spread.worst, spread.client) == (2.0, 1.0, 1.0, 1.0, "c2")
    assert clients([math.nan]).spread("f1", True).client is None
    assert math.isnan(ClientEvaluations().spread("loss", False).mean)


def test_a_value_that_is_not_finite_is_the_worst() -> None:
    spread: Spread = clients([math.inf, 1.0, 2.0], name="mae").spread("mae", False)
    assert (spread.worst, spread.worst_decile, spread.client) == (math.inf, math.inf, "c0")
    assert math.isnan(spread.sd)


def test_loss_and_accuracy_are_not_repeated_among_the_others() -> None:
    logged = {"kl_loss": 1.0, "val_loss": 2.0, "loss": 3.0, "val_acc": 0.5, "acc_top5": 0.9, "f1": 0.4}
    returned = Evaluation.of(7.0, logged, 5, {"f1": True, "val_acc": True})
    assert (returned.loss, returned.accuracy, returned.examples) == (7.0, 0.5, 5)
    assert returned.others == {"kl_loss": 1.0, "loss": 3.0, "acc_top5": 0.9, "f1": 0.4}
    assert returned.higher_is_better == {"f1": True}
    nothing = Evaluation.of(None, logged, 5, {})
    assert (nothing.loss, nothing.accuracy) == (1.0, 0.5)
    assert nothing.others == {"val_loss": 2.0, "loss": 3.0, "acc_top5": 0.9, "f1": 0.4}
    names = ClientEvaluations({"a": returned}).metrics
    assert names == ["loss", "accuracy", "kl_loss", "loss_2", "acc_top5", "f1"]
