"""Samplings that cannot be, and the ways to write down those that can."""

from __future__ import annotations

import math

import numpy as np
import pytest
from jsonargparse import ArgumentParser

from lightning_fed.sampling import (
    Available,
    Bernoulli,
    Blocks,
    DoublyUniform,
    Full,
    NonemptyBernoulli,
    Sampler,
    Systematic,
    Uniform,
    WithReplacement,
)

W = (1.0, 1.0, 2.0, 3.0, 5.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NonemptyBernoulli(0), r"NonemptyBernoulli\.p must lie in \(0, 1\], got 0\.0"),
        (lambda: NonemptyBernoulli([0.5, 0]), r"NonemptyBernoulli\.p must lie in \(0, 1\], got 0\.0 for client 1"),
        (lambda: NonemptyBernoulli([[0.5]]), r"NonemptyBernoulli\.p must be one probability or a list"),
        (lambda: Blocks(0), r"Blocks\.blocks must be a whole number >= 1 or a list of lists, got 0"),
        (lambda: Blocks(2.5), r"Blocks\.blocks must be a whole number >= 1 or a list of lists, got 2\.5"),
        (lambda: Blocks(True), r"Blocks\.blocks must be a whole number >= 1 or a list of lists, got True"),
        (lambda: Blocks([0, 1]), r"Blocks\.blocks must be a list of lists of client indices .*got \[0, 1\]"),
        (lambda: Blocks([]), r"Blocks\.blocks must have at least one block"),
        (lambda: Blocks([[0], []]), r"Blocks\.blocks must not be empty, got block 1 without clients"),
        (lambda: Blocks([[0, 1], [1]]), r"Blocks\.blocks must not overlap, got client 1 twice"),
        (lambda: Blocks([[0, 0]]), r"Blocks\.blocks must not overlap, got client 0 twice"),
        (lambda: Blocks([[-1, 0]]), r"Blocks\.blocks must hold client indices, whole numbers from 0, got -1"),
        (lambda: Blocks(["01"]), r"Blocks\.blocks must hold client indices, whole numbers from 0, got '0'"),
        (lambda: DoublyUniform([1.0]), r"DoublyUniform\.q must be a list, .* sizes 0 to n; got \[1\.0\]"),
        (lambda: DoublyUniform(0.5), r"DoublyUniform\.q must be a list"),
        (lambda: DoublyUniform([1.0, 0.0]), r"DoublyUniform\.q must give some size above 0 a chance, got q_0 = 1"),
        (lambda: DoublyUniform([0.5, 0.4]), r"DoublyUniform\.q must add up to 1, got 0\.9\. Divide"),
        (lambda: DoublyUniform([-0.5, 1.5]), r"DoublyUniform\.q must lie in \[0, 1\], got -0\.5 for size 0"),
        (lambda: DoublyUniform([0.5, math.nan]), r"DoublyUniform\.q must lie in \[0, 1\], got nan for size 1"),
        (lambda: Systematic(0, W), r"Systematic\.size must be a whole number >= 1, got 0"),
        (lambda: Systematic(6, W), r"Systematic\.size must be at most the number of weights, 5, got 6"),
        (lambda: Systematic(1, []), r"Systematic\.weights must be a list with one weight per client, got \[\]"),
        (lambda: Systematic(1, 1.0), r"Systematic\.weights must be a list"),
        (lambda: Systematic(1, [1, 0]), r"Systematic\.weights must be positive and finite, got 0\.0 for client 1"),
        (lambda: Systematic(1, [1, -1]), r"Systematic\.weights must be positive and finite, got -1\.0 for client 1"),
        (lambda: Systematic(1, [math.nan, 1]), r"Systematic\.weights must be positive .* got nan for client 0"),
        (lambda: Systematic(1, [1, 1e-310, 1e300]), r"never draws client 1 of 3: not a proper sampling"),
        (lambda: WithReplacement(0, W), r"WithReplacement\.draws must be a whole number >= 1, got 0"),
        (lambda: WithReplacement(1, [1, 0]), r"WithReplacement\.weights must be positive .*got 0\.0 for client 1"),
        (lambda: WithReplacement(1, [math.inf, 1]), r"WithReplacement\.weights must be .* got inf for client 0"),
        (lambda: WithReplacement(1, [1, 1e-310, 1e300]), r"never draws client 1 of 3: not a proper sampling"),
        (lambda: Available(Uniform(1)), r"Give Available either chance, .* or schedule"),
        (lambda: Available(Uniform(1), 0.5, [[0]]), r"Give Available either chance, .* or schedule"),
        (lambda: Available(Uniform(1), [0.5, 0.0]), r"Available\.chance must lie in \(0, 1\], got 0\.0 for client 1"),
        (lambda: Available(Uniform(1), 1.5), r"Available\.chance must lie in \(0, 1\], got 1\.5"),
        (lambda: Available(Uniform(1), schedule=[]), r"Available\.schedule must have at least one round"),
        (lambda: Available(Uniform(1), schedule=3), r"Available\.schedule must be a list of lists"),
        (lambda: Available(Uniform(1), schedule=[[0.5]]), r"Available\.schedule must hold client indices.*got 0\.5"),
    ],
)
def test_improper_laws_are_refused_at_construction(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("base", [None, Uniform, 0.5, Available(Uniform(1), 0.5)], ids=repr)
def test_only_another_sampling_can_be_restricted(base):
    with pytest.raises(TypeError, match=r"Available\.base must be another sampling such as Uniform\(10\), got"):
        Available(base, 0.5)


@pytest.mark.parametrize(
    ("sampler", "n", "message"),
    [
        (NonemptyBernoulli([0.5, 0.5]), 3, r"NonemptyBernoulli\.p has 2 probabilities for 3 clients"),
        (Blocks(4), 3, r"Cannot make 4 blocks of 3 clients\. Use at most 3"),
        (Blocks([[0, 2]]), 3, r"Blocks\.blocks never draws client 1 of 3: not a proper sampling"),
        (Blocks([[0, 1]]), 3, r"Blocks\.blocks never draws client 2 of 3"),
        (Blocks([[0, 1], [2, 3]]), 3, r"Blocks\.blocks names client 3; the federation has 3, numbered 0 to 2"),
        (DoublyUniform([0.5, 0.5]), 2, r"DoublyUniform\.q has 2 probabilities for 2 clients\. Give 3, of the sizes"),
        (Systematic(1, [1, 2]), 3, r"Systematic\.weights has 2 weights for 3 clients\. Give one per client"),
        (WithReplacement(1, [1, 2]), 1, r"WithReplacement\.weights has 2 weights for 1 clients"),
        (Available(Uniform(4), 0.5), 3, r"Cannot draw 4 clients per round: the federation has 3"),
        (Available(Uniform(1), [0.5, 0.5]), 3, r"Available\.chance has 2 probabilities for 3 clients"),
        (Available(Bernoulli([0.5] * 2), 0.5), 3, r"Bernoulli\.p has 2 probabilities for 3 clients"),
        (Available(Full(), None, [[0], [2]]), 3, r"Available\.schedule never has client 1 of 3 online"),
        (Available(Full(), None, [[0], [1]]), 3, r"Available\.schedule never has client 2 of 3 online"),
        (Available(Full(), None, [[0, 3], [1, 2]]), 3, r"Available\.schedule names client 3; the federation has 3"),
    ],
    ids=repr,
)
def test_samplings_that_do_not_fit_the_federation_are_refused(sampler, n, message):
    with pytest.raises(ValueError, match=message):
        sampler.check(n)


def test_lists_arrays_and_tuples_make_the_same_sampling():
    assert Systematic(2, np.array([1, 2])) == Systematic(2, [1.0, 2.0]) == Systematic(2, (1, 2))
    assert Blocks(np.array([[1, 0], [3, 2]])) == Blocks([[0, 1], (2, 3)])
    assert Available(Full(), schedule=[{1, 0}, [2, 2]]) == Available(Full(), schedule=((0, 1), (2,)))
    assert Bernoulli(0.5) != NonemptyBernoulli(0.5)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("NonemptyBernoulli", {"p": 0.5}, NonemptyBernoulli(0.5)),
        ("Blocks", {"blocks": 3}, Blocks(3)),
        ("Blocks", {"blocks": [[0, 1], [2]]}, Blocks([[0, 1], [2]])),
        ("DoublyUniform", {"q": [0.5, 0.5]}, DoublyUniform([0.5, 0.5])),
        ("Systematic", {"size": 1, "weights": [1, 2]}, Systematic(1, [1, 2])),
        ("WithReplacement", {"draws": 1, "weights": [1, 2]}, WithReplacement(1, [1, 2])),
        (
            "Available",
            {"base": {"class_path": "Uniform", "init_args": {"size": 2}}, "chance": 0.5},
            Available(Uniform(2), 0.5),
        ),
        (
            "Available",
            {"base": {"class_path": "Full"}, "schedule": [[0], [1, 2]]},
            Available(Full(), None, [[0], [1, 2]]),
        ),
    ],
)
def test_a_config_file_can_name_every_sampling(name, arguments, expected):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--sampler", type=Sampler)
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # the name before jsonargparse 4.49
    for path in (name, f"lightning_fed.sampling.{name}"):
        parsed = parser.parse_object({"sampler": {"class_path": path, "init_args": arguments}})
        assert instantiate(parsed).sampler == expected
