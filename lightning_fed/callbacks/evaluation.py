from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_fed.callbacks.client_tables import log_clients, log_spreads
from lightning_fed.core.labels import label_of
from lightning_fed.core.memory import ClientId
from lightning_fed.core.validation import is_whole, one_of, whole
from lightning_fed.evaluation.client_rows import Measured, client_rows
from lightning_fed.evaluation.evaluate import check_differentiable, evaluate_own, evaluate_splits, stationarity
from lightning_fed.evaluation.names import SPREAD
from lightning_fed.evaluation.results import ClientEvaluations, Spread
from lightning_fed.lightning import pl
from lightning_fed.tracking.best import state_sides
from lightning_fed.trainer.hooks import FederatedCallback

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation
    from lightning_fed.trainer.hooks import RoundReport

log = logging.getLogger(__name__)

OBJECTIVE = "federated/objective"


@dataclass(frozen=True, eq=False)
class _Measured(Measured):
    """Results by client, with clients' own models if there is a table, and the gradient mapping if it is logged."""

    gradient_mapping: float = math.nan


class ClientEvaluation(FederatedCallback):
    """Evaluates the server's model on every client, and each client's own model (``own_*``) on its data.

    Logs ``federated/objective`` (the weighted mean of the clients' losses plus g), and on the training, validation and
    test data of all clients, as far as there are any, the sample-weighted mean of every metric that the evaluated step
    logs: ``federated/train_loss``, ``val_loss``, ``test_loss``, ``test_accuracy``, ``test_f1`` and so on; for
    validation and test data also ``_sd``, ``_worst_decile`` and ``_worst`` over clients. More rarely it logs a table
    and histograms by client, with columns ``own_*`` for the client's own x_i on its own test (or else validation)
    data, and the bytes it has received and sent; and a table of means, spreads and worst clients by metric
    (docs/metrics.md).

    The loss is what ``training_step`` returns in evaluation mode (``validation_step`` if optimisation is manual),
    the accuracy the first metric the step logs whose name contains "acc". A client whose loss is not finite makes the
    objective inf or nan, and a warning names it.

    Args:
        every_n_rounds: rounds between evaluations; the last round is always evaluated.
        table_every_n_rounds: rounds between tables; there is always one at the end.
        gradient_mapping: also log the norm of the gradient mapping, which takes a gradient over all data.
        also_after: further numbers of rounds after which to evaluate, such as the first few.
        higher_is_better: by metric, such as ``{"score": True}``, which side is better, where neither torchmetrics nor
            the name of the metric says so, or where they are wrong.
        spread: the splits whose spread over clients is logged: ``held_out`` (training data if there are no others),
            ``all`` or ``none``. The tables have them all.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))}, batch_size=2)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> server = FederatedServer(FedAvg())
    >>> trainer = pl.Trainer(max_epochs=20, callbacks=[server, ClientEvaluation(every_n_rounds=10)], **quiet)
    >>> trainer.fit(MLP((2, 2), lr=1.0), datamodule=data)
    >>> float(trainer.callback_metrics["federated/train_accuracy"])
    1.0
    """

    def __init__(
        self,
        every_n_rounds: int = 1,
        table_every_n_rounds: int = 10,
        gradient_mapping: bool = False,
        also_after: Sequence[int] = (),
        higher_is_better: Mapping[str, bool] | None = None,
        spread: Literal["held_out", "all", "none"] = "held_out",
    ) -> None:
        self.every_n_rounds = every_n_rounds
        self.table_every_n_rounds = table_every_n_rounds
        self.also_after = tuple(also_after)
        whole(self, "every_n_rounds", 1)
        whole(self, "table_every_n_rounds", 1)
        if not all(map(is_whole, self.also_after)):
            raise ValueError(f"ClientEvaluation.also_after must be a list of whole numbers, got {also_after!r}.")
        self.gradient_mapping = gradient_mapping
        self.higher_is_better, self.spread = dict(higher_is_better or {}), spread
        one_of(self, "spread", ("held_out", "all", "none"))
        _check_sides(self.higher_is_better)
        self._evaluated = self._tabled = -1
        self._told: set[ClientId] = set()
        self._noted: set[str] = set()  # metrics of unknown sides, and sides of unknown metrics, that have been told
        self._measured: _Measured | None = None  # in the round that is about to be committed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.gradient_mapping:
            check_differentiable(pl_module, "leave gradient_mapping off")

    def _due(self, trainer: pl.Trainer, round: int) -> tuple[bool, bool]:
        """Whether a round is evaluated, and whether there is a table of it."""
        done = round + 1
        last = done in (trainer.max_epochs, trainer.max_steps)
        evaluate = last or done % self.every_n_rounds == 0 or done in self.also_after
        return evaluate, last or done % self.table_every_n_rounds == 0

    def on_round_played(
        self, trainer: pl.Trainer, module: pl.LightningModule, round: int, federation: Federation
    ) -> None:
        """Measure before the round counts: a client whose data cannot be evaluated leaves no half-finished round."""
        evaluate, table = self._due(trainer, round)
        self._measured = self._measure(trainer, federation, evaluate, table) if evaluate or table else None

    def _measure(self, trainer: pl.Trainer, federation: Federation, evaluate: bool, table: bool) -> _Measured:
        splits = evaluate_splits(trainer, federation.expelled)
        own = evaluate_own(trainer, federation, list(splits)[-1]) if table else None
        mapping = stationarity(trainer, federation) if evaluate and self.gradient_mapping else math.nan
        return _Measured(splits, None if own is None else ClientEvaluations(own), mapping)

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        evaluate, table = self._due(trainer, report.round)
        if not evaluate and not table:
            return
        federation = _federation(trainer)
        measured, self._measured = self._measured, None
        if measured is None or measured.splits["train"].by_client.keys() != federation.weights.keys():  # others by now
            measured = self._measure(trainer, federation, evaluate, table)
        trainer.fit_loop.server.note_clients(trainer, measured)
        spreads = self._spreads(measured.splits)
        report.worst_clients.update({name: s.client for name, s in spreads.items() if s.client is not None})
        if evaluate:
            self._evaluated = report.round
            state_sides(trainer.loggers, self._sides(measured.splits))
            metrics = self._metrics(federation, measured, spreads)
            self.log_round(metrics)
            if math.isnan(f := metrics.get(OBJECTIVE, 0.0)):  # which log_round leaves out
                self.log(OBJECTIVE, torch.tensor(f, dtype=torch.float64), batch_size=1)
        if table:
            self._log_tables(trainer, measured, spreads, report.round)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate the last round if the fit ended early."""
        last = trainer.global_step - 1
        if last < 0 or self._tabled == last:
            return
        federation = _federation(trainer)
        measured = self._measure(trainer, federation, self._evaluated != last, table=True)
        trainer.fit_loop.server.note_clients(trainer, measured)
        spreads = self._spreads(measured.splits)
        if self._evaluated != last:
            metrics = self._metrics(federation, measured, spreads)
            trainer.fit_loop.server.note_metrics(last, metrics)
            state_sides(trainer.loggers, self._sides(measured.splits))
            for logger in trainer.loggers:
                logger.log_metrics({**metrics, "epoch": last}, step=last)
                logger.save()
        self._log_tables(trainer, measured, spreads, last)

    def _spreads(self, splits: Mapping[str, ClientEvaluations]) -> dict[str, Spread]:
        """Every metric over clients, by names such as ``test_loss``."""
        return {
            f"{split}_{metric}": found.spread(metric, self._side(found, metric))
            for split, found in splits.items()
            for metric in found.metrics
        }

    def _side(self, found: ClientEvaluations, metric: str) -> bool | None:
        """Whether higher values are better; None if nobody says so, which is told once."""
        known = self.higher_is_better.get(metric, found.higher_is_better(metric))
        if known is None and metric not in self._noted:
            self._noted.add(metric)
            log.info(
                "Metric %r has no worst clients: neither torchmetrics nor its name says which side is better. Say so:"
                " ClientEvaluation(higher_is_better={%r: True}).",
                *(metric, metric),
            )
        return known

    def _sides(self, splits: Mapping[str, ClientEvaluations]) -> dict[str, bool | None]:
        """By logged name whether higher values are better, for trackers that keep best values."""
        sides: dict[str, bool | None] = {OBJECTIVE: False}
        for split, found in splits.items():
            for metric in found.metrics:
                side, name = self._side(found, metric), f"federated/{split}_{metric}"
                sides |= {name: side, **{f"{name}_{figure}": None if figure == "sd" else side for figure in SPREAD}}
                sides[found.logged_names.get(metric, name)] = side  # the same metric over pooled data
        return sides

    def _tell_of_unknown(self, metrics: set[str]) -> None:
        for name in self.higher_is_better.keys() - metrics - self._noted:
            self._noted.add(name)
            warnings.warn(
                f"ClientEvaluation.higher_is_better names {name!r}, which is not logged: the metrics of this round are"
                f" {sorted(metrics)}.",
                stacklevel=3,
            )

    def _metrics(self, federation: Federation, measured: _Measured, spreads: Mapping[str, Spread]) -> dict[str, float]:
        weights, x_bar, g = federation.weights, federation.server.x_bar, federation.algorithm.g
        train = measured.splits["train"]
        f = sum(weights[cid] * e.loss for cid, e in train.by_client.items()) / sum(weights.values())
        metrics = {OBJECTIVE: f + float(g.finite(x_bar))}
        if g.constrained:
            metrics["federated/violation"] = float((x_bar - g.prox(x_bar, 0.0)).norm())
        splits = list(measured.splits)
        held_out = splits[1:] or splits
        wide = tuple(f"{split}_" for split in {"held_out": held_out, "all": splits, "none": []}[self.spread])
        for name, spread in spreads.items():
            metrics[f"federated/{name}"] = spread.mean
            if name.startswith(wide):
                metrics |= {f"federated/{name}_{figure}": getattr(spread, figure) for figure in SPREAD}
        metrics["federated/gradient_mapping"] = measured.gradient_mapping
        self._tell_of_unknown({metric for found in measured.splits.values() for metric in found.metrics})
        honest = self._tell_of_losses(train)
        return {name: v for name, v in metrics.items() if not math.isnan(v) or (honest and name == OBJECTIVE)}

    def _tell_of_losses(self, train: ClientEvaluations) -> bool:
        """Whether the losses of some clients are not finite; each is named once. A module may report no loss at all."""
        losses = train.values("loss")
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

    def _log_tables(self, trainer: pl.Trainer, measured: _Measured, spreads: Mapping[str, Spread], round: int) -> None:
        self._tabled = round
        worst = [f"{name} {s.worst:.4g} ({label_of(s.client)})" for name, s in spreads.items() if s.client is not None]
        if worst:
            log.info("Worst clients of round %d: %s", round, ", ".join(worst))
        assert measured.own is not None
        if not trainer.loggers:
            return
        log_clients(trainer, client_rows(trainer.datamodule, _federation(trainer), measured), round)
        log_spreads(trainer, {**spreads, **self._spreads({"own": measured.own})}, round)


def _check_sides(sides: Mapping[str, Any]) -> None:
    for name, side in sides.items():
        if not isinstance(name, str) or not isinstance(side, bool):
            raise ValueError(
                "ClientEvaluation.higher_is_better must map names of metrics, such as 'score', to True or False, got"
                f" {name!r}: {side!r}."
            )


def _federation(trainer: pl.Trainer) -> Federation:
    federation: Federation = trainer.fit_loop.server.federation
    return federation
