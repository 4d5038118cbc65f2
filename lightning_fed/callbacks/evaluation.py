from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_fed.core.labels import label_of
from lightning_fed.core.memory import ClientId, Cost, Summary
from lightning_fed.core.validation import whole
from lightning_fed.evaluation.evaluate import check_differentiable, evaluate_own, evaluate_splits, stationarity
from lightning_fed.evaluation.results import ClientEvaluations, Evaluation
from lightning_fed.lightning import pl
from lightning_fed.tracking.wandb import log_table
from lightning_fed.trainer.hooks import FederatedCallback

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation
    from lightning_fed.trainer.hooks import RoundReport


OBJECTIVE = "federated/objective"


class ClientEvaluation(FederatedCallback):
    """Evaluates the server's model on every client, and each client's own model (``own_*``) on its data.

    Logs ``federated/objective`` (the weighted mean of the clients' losses plus g), sample-weighted
    ``federated/train_loss``, ``train_accuracy``, ``test_loss`` and ``test_accuracy``; and, more rarely, a table and
    histograms by client, with columns ``own_*`` for the client's own x_i on its own data, and the bytes it has received
    and sent.

    The loss is what ``training_step`` returns in evaluation mode (``validation_step`` if optimisation is manual),
    the accuracy the first metric the step logs whose name contains "acc". A client whose loss is not finite makes the
    objective inf or nan, and a warning names it.

    Args:
        every_n_rounds: rounds between evaluations; the last round is always evaluated.
        table_every_n_rounds: rounds between tables; there is always one at the end.
        gradient_mapping: also log the norm of the gradient mapping, which takes a gradient over all data.
        also_after: further numbers of rounds after which to evaluate, such as the first few.
    """

    def __init__(
        self,
        every_n_rounds: int = 1,
        table_every_n_rounds: int = 10,
        gradient_mapping: bool = False,
        also_after: Sequence[int] = (),
    ) -> None:
        self.every_n_rounds = every_n_rounds
        self.table_every_n_rounds = table_every_n_rounds
        self.also_after = tuple(also_after)
        whole(self, "every_n_rounds", 1)
        whole(self, "table_every_n_rounds", 1)
        self.gradient_mapping = gradient_mapping
        self._evaluated = self._tabled = -1
        self._told: set[ClientId] = set()
        self._splits: dict[str, ClientEvaluations] | None = None  # of the round that is about to be committed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.gradient_mapping:
            check_differentiable(pl_module, "leave gradient_mapping off")

    def _due(self, trainer: pl.Trainer, round: int) -> tuple[bool, bool]:
        """Whether a round is evaluated, and whether there is a table of it."""
        done = round + 1
        last = done in (trainer.max_epochs, trainer.max_steps)
        evaluate = last or done % self.every_n_rounds == 0 or done in self.also_after
        return evaluate, last or done % self.table_every_n_rounds == 0

    def on_round_played(self, trainer: pl.Trainer, module: pl.LightningModule, round: int) -> None:
        """Evaluate before the round counts: a client whose data cannot be evaluated leaves no half-finished round."""
        due = any(self._due(trainer, round))
        self._splits = evaluate_splits(trainer, _federation(trainer).expelled) if due else None

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        evaluate, table = self._due(trainer, report.round)
        if not evaluate and not table:
            return
        splits, self._splits = self._splits, None
        if splits is None or splits["train"].by_client.keys() != _federation(trainer).weights.keys():  # others by now
            splits = evaluate_splits(trainer, _federation(trainer).expelled)
        if evaluate:
            self._evaluated = report.round
            metrics = self._metrics(trainer, splits)
            self.log_round(metrics)
            if math.isnan(f := metrics.get(OBJECTIVE, 0.0)):  # which log_round leaves out
                self.log(OBJECTIVE, torch.tensor(f, dtype=torch.float64), batch_size=1)
        if table:
            self._log_clients(trainer, splits, report.round)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate the last round if the fit ended early."""
        last = trainer.global_step - 1
        if last < 0 or self._tabled == last:
            return
        splits = evaluate_splits(trainer, _federation(trainer).expelled)
        if self._evaluated != last:
            metrics = self._metrics(trainer, splits)
            for logger in trainer.loggers:
                logger.log_metrics({**metrics, "epoch": last}, step=last)
                logger.save()
        self._log_clients(trainer, splits, last)

    def _metrics(self, trainer: pl.Trainer, splits: dict[str, ClientEvaluations]) -> dict[str, float]:
        federation = _federation(trainer)
        weights, x_bar, g = federation.weights, federation.server.x_bar, federation.algorithm.g
        f = sum(weights[cid] * e.loss for cid, e in splits["train"].by_client.items()) / sum(weights.values())
        metrics = {OBJECTIVE: f + float(g.finite(x_bar))}
        if g.constrained:
            metrics["federated/violation"] = float((x_bar - g.prox(x_bar, 0.0)).norm())
        for split, evaluations in splits.items():
            metrics[f"federated/{split}_loss"] = evaluations.mean("loss")
            metrics[f"federated/{split}_accuracy"] = evaluations.mean("accuracy")
        if self.gradient_mapping:
            metrics["federated/gradient_mapping"] = stationarity(trainer, federation)
        honest = self._tell_of_losses(splits["train"])
        return {name: v for name, v in metrics.items() if not math.isnan(v) or (honest and name == OBJECTIVE)}

    def _tell_of_losses(self, train: ClientEvaluations) -> bool:
        """Whether the losses of some clients are not finite; each is named once. A module may report no loss at all."""
        losses = {cid: e.loss for cid, e in train.by_client.items()}
        bad = {cid: loss for cid, loss in losses.items() if not math.isfinite(loss)}
        if all(math.isnan(loss) for loss in losses.values()):
            return False
        for cid in bad.keys() - self._told:
            warnings.warn(
                f"The loss of client {cid!r} at the server's model is {bad[cid]}, and so is {OBJECTIVE}. Look at this"
                " client's data.",
                stacklevel=3,
            )
        self._told |= bad.keys()
        return bool(bad)

    def _log_clients(self, trainer: pl.Trainer, splits: dict[str, ClientEvaluations], round: int) -> None:
        self._tabled = round
        if not trainer.loggers:
            return
        federation = _federation(trainer)
        own = evaluate_own(trainer, federation, list(splits)[-1])
        kinds = {**{split: found.by_client for split, found in splits.items()}, "own": own}
        columns = ["client", "examples", "visits"]
        columns += [f"{kind}_{what}" for kind in kinds for what in ("loss", "accuracy")]
        columns += ["bytes_down", "bytes_up", "local_steps"]
        rows, nothing = [], Summary(0, Cost())
        for cid in federation.client_ids:
            found = [by_client.get(cid, Evaluation()) for by_client in kinds.values()]
            summary = federation.store.summary(cid) or nothing
            facts = [label_of(cid), trainer.datamodule.num_examples(cid), summary.visits]
            measured = [value for e in found for value in (e.loss, e.accuracy)]
            rows.append([*facts, *measured, summary.cost.bytes_down, summary.cost.bytes_up, summary.cost.steps])
        columns_of_numbers = list(zip(columns, zip(*rows, strict=True), strict=True))[2:]
        known = {name: [float(v) for v in values if not math.isnan(v)] for name, values in columns_of_numbers}
        histograms = {f"clients/{name}": values for name, values in known.items() if values}
        log_table(trainer.loggers, "clients/table", columns, rows, round, histograms)


def _federation(trainer: pl.Trainer) -> Federation:
    federation: Federation = trainer.fit_loop.server.federation
    return federation
