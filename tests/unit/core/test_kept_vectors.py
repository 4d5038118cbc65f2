"""What clients keep: what cannot be computed, and the same bits wherever the rest is computed."""

from __future__ import annotations

import pytest
import torch
from helpers.problems import ALGORITHMS, close, golden, name_of, random_clients
from torch.func import vmap

from lightning_fed import GradientDescent, simulate
from lightning_fed.algorithms import Compressed, FedADMM, FedDR, FedPD
from lightning_fed.core.records import num_bytes
from lightning_fed.transforms import Quantize, TopK

#: Vectors that a client keeps, with a transformed upload one more where the server counts what the client computes.
VECTORS = {
    "FedADMM": 2,
    "FedDR": 2,
    "ParallelDRS": 2,
    "FedDRII": 2,
    "FedPD": 2,
    "FedDyn": 2,
    "FedSplit": 2,
    "Scaffold": 1,
    "FedPrimalDual": 1,
    "FedLin": 2,
}
D = 1000


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_clients_keep_no_more_vectors_than_the_method_needs(algorithm) -> None:
    vectors = VECTORS.get(type(algorithm).__name__, 0)
    vectors -= getattr(algorithm, "mean", "") == "active"  # z_i alone
    vectors += getattr(algorithm, "mode", "") == "upload_first"  # what was uploaded before the last work
    vectors += getattr(algorithm, "client_k", None) is not None  # what compression has kept back
    vectors += getattr(algorithm, "oracle", "") == "II"  # an estimate of the gradient
    state = algorithm.init_client(torch.zeros(D, dtype=torch.float64))
    assert num_bytes(state) // (8 * D) == vectors
    changed = Compressed(algorithm, Quantize(2**12)).init_client(torch.zeros(D, dtype=torch.float64))
    assert num_bytes(changed) // (8 * D) == vectors + algorithm.traits.sends_changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eta", [0.3, 1.0, 7.1])
def test_a_share_has_the_same_bits_alone_in_a_stack_and_as_it_was_counted(dtype: torch.dtype, eta: float) -> None:
    g = torch.Generator().manual_seed(1)
    blank = FedADMM(eta=eta).init_client(torch.zeros(D, dtype=dtype))
    states = [type(blank)(*torch.randn(2, D, generator=g, dtype=dtype), blank.eta) for _ in range(5)]
    rows = [torch.stack([getattr(s, name) for s in states]) for name in ("x_i", "z_i", "eta")]
    stacked = vmap(lambda x, z, eta: type(blank)(x, z, eta).x_hat_i)(*rows)
    assert stacked.dtype == dtype
    for state, row in zip(states, stacked, strict=True):
        by_entry = [float(state.x_i[k] + state.z_i[k] * torch.tensor(1 / eta, dtype=dtype)) for k in range(20)]
        assert torch.equal(state.x_hat_i, row)
        assert state.x_hat_i[:20].tolist() == by_entry


@pytest.mark.parametrize("first", [FedADMM(eta=4.0), Compressed(FedADMM(eta=4.0), TopK(1))], ids=str)
def test_another_penalty_goes_on_from_what_was_counted(first) -> None:
    clients, x0 = random_clients(3, 4, 3)
    begun = simulate(first, clients, x0, rounds=3)
    other = FedADMM(eta=9.0)
    other = Compressed(other, TopK(1)) if isinstance(first, Compressed) else other
    done = simulate(other, clients, cohorts=[{0, 2}, {1}], resume=begun)
    for server, states in zip(done.server, done.clients, strict=True):
        if isinstance(first, Compressed):
            shares = [s.inner.x_hat_i - s.kept for s in states]
        else:
            shares = [s.x_hat_i for s in states]
        close(server.x_tilde, sum(shares) / len(shares), 1e-12)
    inner = [getattr(s, "inner", s) for s in done.clients[-1]]
    assert [float(s.eta) for s in inner] == [9.0, 9.0, 9.0, 4.0]


def test_what_was_not_sent_is_sent_later_as_if_clients_remembered_what_arrived() -> None:
    """The same run in which clients keep their share as it arrived, in a few lines."""
    clients, x0 = golden()
    eta, transform, solver = 6.0, TopK(1), GradientDescent(3, 0.05)
    ours = simulate(Compressed(FedADMM(eta=eta), transform), clients, x0, rounds=12, solver=solver)
    n, x_bar, x_tilde = len(clients), x0, x0.clone()
    z, counted = [torch.zeros_like(x0) for _ in clients], [x0.clone() for _ in clients]
    for server in ours.server[1:]:
        arrived = []
        for i, f in enumerate(clients):
            x = solver(f, x_bar, z[i], eta, x_bar).x
            z[i] = z[i] + eta * (x - x_bar)
            sent = transform(x + z[i] / eta - counted[i], torch.Generator()).value
            counted[i] = counted[i] + sent
            arrived.append(sent)
        x_tilde = x_tilde + sum(arrived) / n
        x_bar = x_tilde
        close(server.x_bar, x_bar, 1e-12)


def test_copies_of_the_consensus_are_computed() -> None:
    clients, x0 = golden()
    history = simulate(FedPD(eta_hat=0.2, skip=0.5, seed=3), clients, x0, rounds=8)
    for states in history.clients[1:]:
        for s in states:
            close(s.x_0i, s.x_i + 0.2 * s.lam_i, 1e-13)


def test_feddr_computes_its_share() -> None:
    clients, x0 = golden()
    history = simulate(FedDR(eta_hat=0.2), clients, x0, rounds=4)
    close(history.server[-1].x_tilde, sum(s.x_hat_i for s in history.clients[-1]) / len(clients), 1e-13)
