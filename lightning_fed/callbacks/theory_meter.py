from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from lightning_fed.core.layout import Layout, parameters_of
from lightning_fed.core.randomness import numpy_generator, torch_generator
from lightning_fed.core.validation import whole
from lightning_fed.evaluation.curvature import client_curvature
from lightning_fed.evaluation.evaluate import check_differentiable, client_gradient, stationarity
from lightning_fed.evaluation.personal import as_client
from lightning_fed.lightning import pl
from lightning_fed.theory.bounds import distance_to_solution, eta_min
from lightning_fed.theory.residuals import penalty_bound
from lightning_fed.trainer.eligibility import plain_lr
from lightning_fed.trainer.hooks import FederatedCallback

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation
    from lightning_fed.core.messages import Reply
    from lightning_fed.trainer.hooks import RoundReport, Visit


class TheoryMeter(FederatedCallback):
    r"""Measures the theorem's quantities along a run, and warns once if the settings are outside its range.

    Logs ``theory/L`` (largest curvature of some clients' losses at the server's model: a lower bound of the true L),
    ``theory/stationarity`` (norm of the gradient mapping), and, if they are defined:

    - ``theory/eta_min`` and ``theory/eta_over_bound``: lower bound of the penalty, and penalty / eta_min; for
      FedADMM, FedDR and FedPD in all their forms;
    - ``theory/lr_stability``: lr * (L + rho), which must stay below 2; for SGD;
    - ``theory/residual_mean`` and ``_max``: norms of the local problems' gradients at the cohort's replies, over
      all data of each client;
    - ``theory/inexactness_mean`` and ``_max``: the same divided by rho - L, which bounds the distance to the exact
      local solutions; if rho > L.

    Args:
        every: rounds between measurements; the first and the last round are always measured.
        clients: number of clients to measure L on, drawn from (seed, round).
        gamma4: of :func:`~lightning_fed.theory.bounds.eta_min`.
        iterations: most passes over a client's data to find its curvature.
        certificates: whether to measure how exact the cohort's replies are, with a pass over the data of each client.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedADMM
    >>> from lightning_fed.models import MLP
    >>> from lightning_fed.theory import eta_min
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))}, batch_size=2)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> server = FederatedServer(FedADMM(eta=5.0))
    >>> trainer = pl.Trainer(max_epochs=2, callbacks=[server, TheoryMeter()], **quiet)
    >>> trainer.fit(MLP((2, 2), lr=0.01), datamodule=data)
    >>> L, bound = (float(trainer.callback_metrics[f"theory/{name}"]) for name in ("L", "eta_min"))
    >>> abs(bound - eta_min(L, gamma4=0.05)) < 1e-6, bound < 5.0  # the penalty is large enough
    (True, True)
    """

    def __init__(
        self, every: int = 10, clients: int = 5, gamma4: float = 0.05, iterations: int = 20, certificates: bool = True
    ) -> None:
        self.every, self.clients, self.iterations = every, clients, iterations
        for name in ("every", "clients", "iterations"):
            whole(self, name, 1)
        eta_min(1.0, gamma4)
        self.gamma4, self.certificates = gamma4, certificates
        self._due = False
        self._measured: dict[str, float] = {}
        self._residuals: list[tuple[float, float]] = []  # of the cohort, with the penalty of each problem
        self._warned: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_differentiable(pl_module, "leave TheoryMeter out")
        server = trainer.fit_loop.server
        layout, rounds_done = Layout.of(pl_module, server.personal), server.rounds_done
        self._judge(trainer, self._lipschitz(trainer, layout, rounds_done))

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        self._due = round % self.every == 0 or round + 1 in (trainer.max_epochs, trainer.max_steps)
        self._residuals = []

    def on_client_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit, reply: Reply[Any, Any]
    ) -> None:
        if not self._due or not self.certificates or visit.question is None:
            return
        if visit.certificate is not None:
            self._residuals.append((visit.certificate.residual, visit.question.rho))
            return
        layout = trainer.fit_loop.server.federation.layout
        slope = client_gradient(trainer, layout, visit.client)
        gradient = visit.question.gradient(layout.flatten(parameters_of(module)), slope)
        self._residuals.append((float(gradient.norm()), visit.question.rho))

    def on_round_played(
        self, trainer: pl.Trainer, module: pl.LightningModule, round: int, federation: Federation
    ) -> None:
        """Measure before the round counts, as every evaluation of clients does."""
        if self._due:
            L = self._lipschitz(trainer, federation.layout, federation.rounds_done)
            self._measured = {"L": L, "stationarity": stationarity(trainer, federation)}

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        if not self._due:
            return
        L = self._measured["L"]
        metrics = {**self._measured, **self._judge(trainer, L)}
        metrics |= _mean_and_max("residual", [residual for residual, _ in self._residuals])
        near = [distance_to_solution(residual, rho, L) for residual, rho in self._residuals if 0 < L < rho]
        metrics |= _mean_and_max("inexactness", near)
        self.log_round({f"theory/{name}": value for name, value in metrics.items() if math.isfinite(value)})

    def _lipschitz(self, trainer: pl.Trainer, layout: Layout, rounds_done: int) -> float:
        server, ids = trainer.fit_loop.server, trainer.datamodule.client_ids
        key = (server.seed, rounds_done, "theory")
        drawn = numpy_generator(*key).choice(len(ids), min(self.clients, len(ids)), replace=False)
        found = []
        for cid in (ids[i] for i in sorted(drawn)):
            with as_client(trainer, cid):
                generator = torch_generator(*key, cid)
                found.append(client_curvature(trainer, layout, cid, generator, iterations=self.iterations).L)
        return max(found)

    def _judge(self, trainer: pl.Trainer, L: float) -> dict[str, float]:
        """Compare the settings with L, and warn the first time that they are out of range."""
        server, facts = trainer.fit_loop.server, {}
        algorithm = server.algorithm if server.federation is None else server.federation.algorithm
        traits = algorithm.traits  # before the first round, eta="auto" is not yet a number and its penalty 0
        rho, alpha = traits.penalty, traits.relaxation
        clients = min(self.clients, len(trainer.datamodule.client_ids))
        measured = f"as L is at least {L:.4g} on {clients} clients after {server.rounds_done} rounds"
        if alpha is not None and rho > 0 and L > 0:
            facts["eta_min"] = bound = penalty_bound(L, alpha, self.gamma4)
            facts["eta_over_bound"] = rho / bound
            if rho <= bound:
                self._warn("penalty", f"{type(server.algorithm).__name__}'s {_too_bold(rho, bound, L, measured)}")
        lr = plain_lr(trainer.optimizers)
        if lr is not None:
            facts["lr_stability"] = lr * (L + rho)
            if lr * (L + rho) >= 2:
                self._warn(
                    "lr",
                    f"lr * (L + rho) = {lr:.4g} * ({L:.4g} + {rho:.4g}) = {lr * (L + rho):.4g} >= 2, {measured}:"
                    " plain gradient steps on the local problem diverge. Use a learning rate below"
                    f" {2 / (L + rho):.4g}; 1 / (L + rho) = {1 / (L + rho):.4g} is safe.",
                )
        return facts

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=4)


def _too_bold(rho: float, bound: float, L: float, measured: str) -> str:
    promise = "convergence is not guaranteed where losses are not convex"
    if bound == math.inf:
        remedy = f" Below 2 - 2 L / penalty = {2 - 2 * L / rho:.4g} it would be in its range." if rho > L else ""
        return f"relaxation 2 is outside the theorem's range, {measured}: {promise}.{remedy}"
    return (
        f"penalty {rho:.4g} is below the theorem's bound {bound:.4g}, {measured}: {promise}. A penalty (FedADMM's eta,"
        f" else 1 / eta_hat) above {bound:.4g} would be in its range; the bound is cautious."
    )


def _mean_and_max(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": max(values)} if values else {}
