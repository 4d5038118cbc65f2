"""Consensus model-predictive control
=====================================

Four agents agree on the inputs of one plant, with some absent in each round.

At each time, a few rounds of FedADMM compute the inputs ``U = (u_0 .. u_{T-1})`` of the least mean cost within bounds;
``u_0`` is applied, the plant moves, and all agents continue from their last variables, shifted by one time step.
"""

# sphinx_gallery_thumbnail_path = "mpc.png"

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_fed import Exact, Quadratic
from lightning_fed.algorithms import FedADMM
from lightning_fed.algorithms.fedadmm_paper import ClientState
from lightning_fed.core import Broadcast
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId, Memory, MemoryStore
from lightning_fed.core.round import Step, run_round
from lightning_fed.laboratory.quadratic import Oracle
from lightning_fed.prox import Box
from lightning_fed.sampling import Uniform

N, T, U_MAX = 4, 10, 2.0  # subsystems, each with an agent and an input; horizon; bound of the inputs
START = torch.tensor([1, 0, -1, 0, 0.5, 0, -0.5, 0], dtype=torch.float64)  # position, velocity of each subsystem
WEIGHTS: dict[ClientId, float] = dict.fromkeys(range(N), 1.0)  # all agents have equal weight
EYE = torch.eye(N, dtype=torch.float64)


def plant() -> tuple[Tensor, Tensor]:
    """``A``, ``B`` of ``s+ = A s + B u``: four carts in a ring, each pulled towards the next by a spring."""
    A = torch.kron(EYE, torch.tensor([[1, 0.1], [0, 1]], dtype=torch.float64))
    A[1::2, ::2] += 0.05 * (EYE.roll(1, dims=1) - EYE)
    return A, torch.kron(EYE, torch.tensor([[0], [0.1]], dtype=torch.float64))


def costs() -> list[tuple[Tensor, Tensor]]:
    """``(Q_i, R_i)``: agent i weighs its own subsystem only, and each agent is stricter than the one before."""
    own = [torch.diag(EYE[i]) for i in range(N)]
    return [(torch.kron(e, torch.tensor([[10.0 * (i + 1), 0], [0, 1]]).double()), 0.1 * e) for i, e in enumerate(own)]


def prediction(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """``Phi``, ``Gamma`` of ``(s_1 .. s_T) = Phi s_now + Gamma U``."""
    powers = [torch.linalg.matrix_power(A, t) for t in range(T + 1)]
    rows = [torch.cat([powers[t - j] @ B if j <= t else 0 * B for j in range(T)], 1) for t in range(T)]
    return torch.cat(powers[1:]), torch.cat(rows)


@cache
def agents() -> list[tuple[Tensor, Tensor]]:
    """``(H_i, K_i)`` of the agents' costs ``f_i(U) = U' H_i U / 2 + (K_i s_now)' U``."""
    Phi, Gamma = prediction(*plant())
    over_time = torch.eye(T, dtype=torch.float64)
    weighed = [(Gamma.T @ torch.kron(over_time, Q_i), torch.kron(over_time, R_i)) for Q_i, R_i in costs()]
    return [(left @ Gamma + R_bar_i, left @ Phi) for left, R_bar_i in weighed]


def centralised(s_now: Tensor) -> Tensor:
    """The centralised optimum ``U`` of all costs, by accelerated projected gradient."""
    H, K = (torch.stack(both).mean(0) for both in zip(*agents(), strict=True))
    eigenvalues = torch.linalg.eigvalsh(H)
    root = (eigenvalues[0] / eigenvalues[-1]).sqrt()
    U = before = torch.zeros(N * T, dtype=torch.float64)
    for _ in range(2000):
        ahead = U + (1 - root) / (1 + root) * (U - before)
        before, U = U, (ahead - (H @ ahead + K @ s_now) / eigenvalues[-1]).clamp(-U_MAX, U_MAX)
        if torch.allclose(U, before, rtol=0, atol=1e-13):
            break
    return U


@dataclass
class Engine:
    """Visits the agents of a round, one after another; each solves its local problem exactly."""

    clients: Sequence[Quadratic]

    def ask(self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]) -> Iterator[Any]:
        for i, state in zip(cohort, states, strict=True):
            yield step(state, down, Oracle(self.clients[int(i)], Exact()))


@dataclass
class Consensus:
    """The federated controller, with ``rounds`` rounds per time step and ``size`` agents in each of them."""

    rounds: int
    size: int = N
    warm: bool = True
    seed: int = 0
    algorithm: FedADMM = FedADMM(eta=0.2, g=Box(-U_MAX, U_MAX))
    time: int = 0
    bytes_sent: int = 0

    def reset(self) -> None:
        x0 = torch.zeros(N * T, dtype=torch.float64)
        self.server = self.algorithm.init_server(x0)
        self.store = MemoryStore(fresh=lambda: self.algorithm.init_client(x0))

    def __call__(self, s_now: Tensor) -> Tensor:
        """The agreed inputs for the plant's state ``s_now``."""
        self.shift() if self.warm and self.time else self.reset()
        engine = Engine([Quadratic(H_i, -K_i @ s_now) for H_i, K_i in agents()])
        for k in range(self.time * self.rounds, (self.time + 1) * self.rounds):
            cohort = Uniform(self.size).cohort(N, self.seed, round=k)
            broadcast = partial(self.algorithm.broadcast, work=LocalWork(self.seed))
            recall = lambda i: self.store[i].state  # noqa: E731
            done = run_round(self.algorithm, self.server, cohort, engine, recall, WEIGHTS, broadcast)
            self.server = done.server
            self.store.put({i: Memory(state) for i, state in done.states.items()})
            self.bytes_sent += done.bytes_down + done.bytes_up
        self.time += 1
        return self.server.x_bar

    def shift(self) -> None:
        """Shift all variables by one time step; the last input is repeated."""
        eta, g = self.algorithm.eta, self.algorithm.g
        for i in range(N):
            x_i, z_i = (torch.cat([v[N:], v[-N:]]) for v in (self.store[i].state.x_i, self.store[i].state.z_i))
            self.store.put({i: Memory(ClientState(x_i, z_i, torch.tensor(eta, dtype=x_i.dtype)))})
        x_tilde = torch.stack([self.store[i].state.x_hat_i for i in range(N)]).mean(0)
        self.server = replace(self.server, x_bar=g.prox(x_tilde, 1 / eta), x_tilde=x_tilde)


def closed_loop(controller: Callable[[Tensor], Tensor], steps: int = 30) -> tuple[Tensor, Tensor, float]:
    """States and inputs by time, and the cost of all agents, if the first input of ``controller`` is applied."""
    A, B = plant()
    Q, R = (torch.stack(both).sum(0) for both in zip(*costs(), strict=True))
    states, inputs = [START], []
    for _ in range(steps):
        inputs.append(controller(states[-1])[:N])
        states.append(A @ states[-1] + B @ inputs[-1])
    J = sum(float(s @ Q @ s + u @ R @ u) / 2 for s, u in zip(states[:-1], inputs, strict=True))
    return torch.stack(states), torch.stack(inputs), J


def gap_curves(size: int, steps: int, J_best: float) -> dict[str, dict[int, float]]:
    """``|J / J_best - 1|`` by rounds per step: with ``size`` agents per round, with all, and with cold starts."""
    curves: dict[str, dict[int, float]] = {}
    for m, warm, k in ((*kind, k) for kind in ((size, True), (N, True), (N, False)) for k in (1, 2, 3, 5, 10, 20)):
        J = closed_loop(Consensus(k, m, warm), steps)[2]
        curves.setdefault(f"{m} of {N} agents, {'warm' if warm else 'cold'} start", {})[k] = abs(J / J_best - 1)
    return curves


def draw(states: Sequence[Tensor], inputs: Sequence[Tensor], curves: dict[str, dict[int, float]], title: str) -> Figure:
    """States and inputs of both controllers, the consensus first, and the price of few rounds."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3)
    dotted = {"color": "black", "linestyle": ":", "linewidth": 1}
    for i in range(N):
        left.plot(states[0][:, 2 * i], label=f"cart {i}")
        middle.stairs(inputs[0][:, i], baseline=None, color=f"C{i}", linewidth=1.5)
        middle.stairs(inputs[1][:, i], baseline=None, **dotted)
    left.plot(states[1][:, ::2], label=["centralised", *[None] * (N - 1)], **dotted)
    middle.hlines([-U_MAX, U_MAX], 0, len(inputs[0]), color="grey", linestyle="--", linewidth=1)
    for (kind, curve), style in zip(curves.items(), ("o-", "s-", "^--"), strict=False):
        right.loglog(list(curve), list(curve.values()), style, label=kind)
        right.set_xticks(list(curve), list(map(str, curve)))
    right.minorticks_off()
    left.legend()
    right.legend()
    for axes, title in ((left, "Positions"), (middle, "Inputs and bounds"), (right, "|cost / centralised cost - 1|")):
        axes.set(title=title, xlabel="FedADMM rounds per time step" if axes is right else "time step")
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds-per-step", type=int, default=5)
    parser.add_argument("--agents-per-round", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/mpc"))
    args = parser.parse_args()
    if args.rounds_per_step < 1 or args.steps < 1 or not 1 <= args.agents_per_round <= N:
        parser.error(f"at least one round and one step are needed, and 1 to {N} agents per round")
    consensus = Consensus(args.rounds_per_step, args.agents_per_round)
    states, inputs, J = zip(*(closed_loop(c, args.steps) for c in (consensus, centralised)), strict=True)
    scalars = consensus.bytes_sent // START.element_size() // args.steps
    title = f"{args.agents_per_round} of {N} agents in each of {args.rounds_per_step} FedADMM rounds per time step"
    print(title)
    print(f"Cost J:         {J[0]:.6f}, centralised {J[1]:.6f}, gap {J[0] / J[1] - 1:+.2e}")
    print(f"Final state:    |s| = {states[0][-1].norm():.6f}, centralised {states[1][-1].norm():.6f}")
    print(f"Inputs:         {inputs[0].min():g} to {inputs[0].max():g}, bounds {-U_MAX:g} and {U_MAX:g}")
    print(f"Communication:  {scalars} scalars per time step, {scalars / N:g} per agent")
    args.out.mkdir(parents=True, exist_ok=True)
    curves = gap_curves(args.agents_per_round, args.steps, J[1])
    draw(states, inputs, curves, title).savefig(args.out / "closed_loop.png", dpi=120)
    print(f"Figure:         {args.out / 'closed_loop.png'}")


if __name__ == "__main__":
    main()
