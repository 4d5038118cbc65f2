"""Every wrong hyper-parameter is refused by a message that names the class, the field and the value."""

import dataclasses
import re

import pytest
from helpers.problems import ALGORITHMS

from lightning_fed.algorithms import (
    FedADMM,
    FedAvg,
    FedDR,
    FedDRII,
    FedDualAvg,
    FedDyn,
    FedLin,
    FedMid,
    FedPD,
    FedProx,
    FedSplit,
    ParallelDRS,
    Scaffold,
)
from lightning_fed.core import hyper_parameters
from lightning_fed.core.validation import shown
from lightning_fed.prox import L1

KINDS = list({type(algorithm): algorithm for algorithm in ALGORITHMS}.values())
NO_NUMBERS = [-1.0, -1e-300, float("nan"), float("inf"), float("-inf"), "1", None, True, [1.0], 1j]
NO_CHOICES = ["nonsense", "", None, 3]


def fields_of(algorithm, kind):
    return [f.name for f in dataclasses.fields(algorithm) if type(f.default) is kind]


def refusals(kind, values):
    return [
        pytest.param(algorithm, name, value, id=f"{type(algorithm).__name__}.{name}={value!r}")
        for algorithm in KINDS
        for name in fields_of(algorithm, kind)
        for value in values
    ]


def refuses(algorithm, name, value):
    about = rf"^{type(algorithm).__name__}\.{name} must .*got {re.escape(repr(value))}[.,]"
    with pytest.raises(ValueError, match=about):
        dataclasses.replace(algorithm, **{name: value})


@pytest.mark.parametrize(("algorithm", "name", "value"), refusals(float, NO_NUMBERS))
def test_what_is_no_finite_non_negative_number_is_refused(algorithm, name, value):
    refuses(algorithm, name, value)


@pytest.mark.parametrize(("algorithm", "name", "value"), refusals(str, NO_CHOICES))
def test_an_unknown_choice_is_refused(algorithm, name, value):
    refuses(algorithm, name, value)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *((FedADMM(), name) for name in ("eta", "alpha")),
        *((FedDR(), name) for name in ("eta_hat", "alpha")),
        *((kind(), "eta_hat") for kind in (FedDRII, FedPD)),
        *((kind(), "server_lr") for kind in (FedAvg, Scaffold, FedMid, FedDualAvg)),
        (FedDyn(), "alpha"),
        (FedSplit(), "s"),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_zero_is_refused_where_a_step_would_vanish(algorithm, name, zero):
    refuses(algorithm, name, zero)


@pytest.mark.parametrize("algorithm", [FedADMM(), FedDR()], ids=["FedADMM", "FedDR"])
@pytest.mark.parametrize("alpha", [2.0000001, 3, 100.0])
def test_relaxation_beyond_two_is_refused(algorithm, alpha):
    refuses(algorithm, "alpha", alpha)
    with pytest.raises(ValueError, match="at most 2, got"):
        dataclasses.replace(algorithm, alpha=alpha)


@pytest.mark.parametrize("option", [0, 3, "2", None, True, 1.5], ids=repr)
def test_an_option_of_scaffold_that_is_none_is_refused(option):
    with pytest.raises(ValueError, match=rf"Scaffold\.option must be 1 or 2, got {option!r}\."):
        Scaffold(option)


@pytest.mark.parametrize("name", ["client_k", "server_k"])
@pytest.mark.parametrize("k", [0, -1, 1.5, True, "1"], ids=repr)
def test_a_number_of_entries_that_is_none_is_refused(name, k):
    refuses_whole = rf"FedLin\.{name} must be a whole number >= 1, got {shown(k)}\."
    with pytest.raises(ValueError, match=refuses_whole):
        FedLin(**{name: k})


@pytest.mark.parametrize("skip", [1, 1.0, 1.5])
def test_never_talking_is_refused(skip):
    with pytest.raises(
        ValueError, match=rf"FedPD\.skip must stay below 1, got {skip!r}: no round would have an exchange"
    ):
        FedPD(skip=skip)


@pytest.mark.parametrize("seed", [0.5, None, "0", True], ids=repr)
def test_a_seed_of_coins_that_is_none_is_refused(seed):
    with pytest.raises(ValueError, match=rf"FedPD\.seed must be a whole number, got {shown(seed)}\."):
        FedPD(seed=seed)


def test_borders_of_the_ranges_are_accepted():
    assert FedADMM(eta=1, alpha=2).alpha == 2
    assert FedDR(eta_hat=1e-9, alpha=2.0, init="prox").eta_hat == 1e-9
    assert FedProx(mu=0).mu == 0
    assert FedAvg(server_lr=5).server_lr == 5


def test_refusals_say_what_to_do():
    with pytest.raises(ValueError, match=r"FedADMM\.eta must be positive, got -0\.1\. .*start from 1\.0"):
        FedADMM(eta=-0.1)
    with pytest.raises(ValueError, match=r"FedProx\.mu must be non-negative, got -1\. .*0 is FedAvg"):
        FedProx(mu=-1)
    with pytest.raises(ValueError, match=r"FedDR\.init must be one of x0, prox; got 'y0'\."):
        FedDR(init="y0")
    with pytest.raises(ValueError, match=r"FedADMM\.start must be one of local, server, centre; got 'center'\."):
        FedADMM(start="center")


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_hyper_parameters_are_frozen_comparable_and_printable(algorithm):
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.weights = "uniform"
    same = dataclasses.replace(algorithm)
    assert same == algorithm
    assert hash(same) == hash(algorithm)
    listed = hyper_parameters(algorithm)
    assert listed["name"] == type(algorithm).__name__
    assert listed.keys() == {"name"} | {f.name for f in dataclasses.fields(algorithm)}


def test_defaults_are_those_of_the_papers_where_they_name_one():
    assert hyper_parameters(FedADMM()) == {
        "name": "FedADMM",
        "eta": 1.0,
        "alpha": 1.0,
        "g": {"name": "Zero"},
        "weights": "uniform",
        "start": "server",
        "project_initial": False,
        "mean": "all",
    }
    assert (FedDR().eta_hat, FedDR().alpha, FedDR().init, FedDR().weights) == (1.0, 1.0, "x0", "uniform")
    assert (FedAvg().weights, FedAvg().server_lr, FedProx().weights) == ("samples", 1.0, "samples")


@pytest.mark.parametrize("kind", [FedADMM, FedDR, FedDRII, ParallelDRS], ids=lambda kind: kind.__name__)
def test_local_work_starts_at_the_server_model_by_default(kind):
    assert kind().start == "server"


def test_the_penalty_is_the_rho_of_the_question():
    assert FedADMM(eta=3.0).traits.penalty == 3.0
    assert FedDR(eta_hat=0.25).traits.penalty == 4.0
    assert FedAvg().traits.penalty == 0.0
    assert FedProx(mu=0.5).traits.penalty == 0.5


def test_only_feddr_from_prox_and_fedlin_ask_everybody_first():
    first = {type(a).__name__ for a in ALGORITHMS if a.traits.full_start}
    assert first == {"FedDR", "FedLin"}
    assert FedDR(init="prox").traits.full_start
    assert not FedDR().traits.full_start


def test_a_regulariser_shows_in_the_hyper_parameters():
    assert hyper_parameters(FedADMM(g=L1(0.2)))["g"] == {"name": "L1", "c": 0.2, "on": None}
