from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed._compat import batch_size_of, call_strategy_hook, is_overridden, is_param_in_hook_signature
from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.loops import RoundResults
from lightning_fed.store import ClientId
from lightning_fed.theory import gradient_mapping
from lightning_fed.tracking import log_histogram, log_table
from lightning_fed.vector import buffers_of, clones, overwrite, parameters_of, restore_buffers
from lightning_fed.visit import move_batch

if TYPE_CHECKING:
    from lightning_fed.federation import Federation
    from lightning_fed.server import FederatedServer, RoundReport


@dataclass
class Evaluation:
    """A model on one client's data: mean loss, accuracy (nan where the module reports none), number of samples."""

    loss: float = math.nan
    accuracy: float = math.nan
    examples: int = 0


@dataclass
class ClientEvaluations:
    """Evaluations by client of one split."""

    by_client: dict[ClientId, Evaluation] = field(default_factory=dict)

    def mean(self, what: str) -> float:
        """Sample-weighted mean over the clients that report it."""
        known = [(getattr(e, what), e.examples) for e in self.by_client.values() if not math.isnan(getattr(e, what))]
        total = sum(examples for _, examples in known)
        return sum(value * examples for value, examples in known) / total if total else math.nan


class ClientEvaluation(FederatedCallback):
    """Evaluates the server's model on every client, and each client's own model under another name.

    Logs ``federated/objective`` (the weighted mean of the clients' losses plus g), sample-weighted
    ``federated/train_loss``, ``train_accuracy``, ``test_loss`` and ``test_accuracy``; and, more rarely, a table and
    histograms by client, with columns ``own_*`` for the client's own x_i on its own data.

    The loss is what ``training_step`` returns in evaluation mode (``validation_step`` where optimisation is manual),
    the accuracy the first metric the step logs whose name contains "acc".

    Args:
        every_n_rounds: rounds between evaluations; the last round is always evaluated.
        table_every_n_rounds: rounds between tables; there is always one at the end.
        gradient_mapping: also log the norm of the gradient mapping, which takes a gradient over all data.
    """

    def __init__(self, every_n_rounds: int = 1, table_every_n_rounds: int = 10, gradient_mapping: bool = False) -> None:
        for name, value in {"every_n_rounds": every_n_rounds, "table_every_n_rounds": table_every_n_rounds}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ClientEvaluation.{name} must be a whole number >= 1, got {value!r}.")
        self.every_n_rounds = every_n_rounds
        self.table_every_n_rounds = table_every_n_rounds
        self.gradient_mapping = gradient_mapping
        self._tabled = -1

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        done = report.round + 1
        last = done in (trainer.max_epochs, trainer.max_steps)
        if done % self.every_n_rounds and not last:
            return
        splits = evaluate_splits(trainer)
        self.log_dict(self._metrics(trainer, splits), batch_size=1)
        if done % self.table_every_n_rounds == 0 or last:
            self._log_clients(trainer, splits, report.round)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rounds = trainer.global_step
        if rounds and self._tabled != rounds - 1:
            self._log_clients(trainer, evaluate_splits(trainer), rounds - 1)

    def _metrics(self, trainer: pl.Trainer, splits: dict[str, ClientEvaluations]) -> dict[str, float]:
        server = server_of(trainer)
        federation = server.federation
        assert federation is not None
        weights, x_bar = federation.weights, federation.server.x_bar
        train = splits["train"].by_client
        f = sum(weights[cid] * e.loss for cid, e in train.items()) / sum(weights.values())
        g = federation.algorithm.g
        metrics = {"federated/objective": f + (0.0 if g.indicator else float(g(x_bar)))}
        if g.indicator:
            metrics["federated/violation"] = float((x_bar - g.prox(x_bar, 1.0)).norm())
        for split, evaluations in splits.items():
            metrics[f"federated/{split}_loss"] = evaluations.mean("loss")
            metrics[f"federated/{split}_accuracy"] = evaluations.mean("accuracy")
        if self.gradient_mapping:
            rho = federation.algorithm.penalty or 1.0
            gradient = full_gradient(trainer, federation)
            mapping = gradient_mapping(federation.algorithm, x_bar, gradient, rho)
            metrics["federated/gradient_mapping"] = float(mapping.norm())
        return {name: value for name, value in metrics.items() if not math.isnan(value)}

    def _log_clients(self, trainer: pl.Trainer, splits: dict[str, ClientEvaluations], round: int) -> None:
        federation = server_of(trainer).federation
        assert federation is not None
        self._tabled = round
        if not trainer.loggers:
            return
        own = evaluate_own(trainer, federation, list(splits)[-1])
        columns = ["client", "examples", "visits"]
        columns += [f"{split}_{what}" for split in splits for what in ("loss", "accuracy")] + [
            "own_loss",
            "own_accuracy",
        ]
        rows = []
        for cid in federation.client_ids:
            found = [splits[split].by_client.get(cid, Evaluation()) for split in splits] + [own.get(cid, Evaluation())]
            facts = [str(cid), trainer.datamodule.num_examples(cid), federation.store[cid].visits]
            rows.append(facts + [value for e in found for value in (e.loss, e.accuracy)])
        log_table(trainer.loggers, "clients/table", columns, rows, round)
        for i, column in enumerate(columns[2:], start=2):
            if values := [float(row[i]) for row in rows if not math.isnan(row[i])]:
                log_histogram(trainer.loggers, f"clients/{column}", values, round)


def server_of(trainer: pl.Trainer) -> FederatedServer:
    """The trainer's FederatedServer."""
    server: FederatedServer = trainer.fit_loop.server
    return server


def evaluate_splits(trainer: pl.Trainer) -> dict[str, ClientEvaluations]:
    """The model the module holds, on every client's train data and its test (or else validation) data."""
    data: Any = trainer.datamodule
    held_out = [split for split in ("test", "val") if data.has_split(split)]
    with measuring(trainer):
        return {
            split: ClientEvaluations({cid: evaluate(trainer, cid, split) for cid in data.split_ids(split)})
            for split in ["train", *held_out[:1]]
        }


def evaluate_own(trainer: pl.Trainer, federation: Federation, split: str) -> dict[ClientId, Evaluation]:
    """Each client's own model on its own data, where the algorithm keeps one."""
    module, data = trainer.lightning_module, trainer.datamodule
    parameters, buffers = clones(parameters_of(module)), clones(buffers_of(module))
    found = {}
    with measuring(trainer):
        for cid in data.split_ids(split):
            x_i = federation.algorithm.local_model(federation.recall(cid))
            if x_i is None or not federation.store[cid].visits:
                continue
            overwrite(parameters_of(module), federation.layout.split(x_i))
            restore_buffers(module, {**buffers, **federation.store[cid].buffers})
            found[cid] = evaluate(trainer, cid, split)
    overwrite(parameters_of(module), parameters)
    restore_buffers(module, buffers)
    return found


def evaluate(trainer: pl.Trainer, cid: ClientId, split: str) -> Evaluation:
    """The model the module holds on one client's data; to be called inside :func:`measuring`."""
    module, data = trainer.lightning_module, trainer.datamodule
    step = _step(module, split)
    if step is None:
        return Evaluation()
    loop = trainer.fit_loop.epoch_loop
    loop._results = results = RoundResults(training=True)
    results.complete = True
    for metric in _metrics_of(module):
        metric.reset()
    buffers = clones(buffers_of(module))
    total, examples, reported = 0.0, 0, 0
    for batch_idx, batch in enumerate(data.client_eval_dataloader(cid, split)):
        batch = move_batch(trainer, batch)
        results.batch, results.batch_size = batch, None
        with torch.set_grad_enabled(step == "training_step"):  # which may differentiate inside itself
            loss, size = _loss(_call(trainer, step, batch, batch_idx)), batch_size_of(batch)
        examples += size
        if loss is not None:
            total, reported = total + float(loss.detach()) * size, reported + size
    restore_buffers(module, buffers)
    logged = results.metrics(on_step=False)["callback"]
    loss_named = next((float(v) for name, v in logged.items() if "loss" in name.lower()), math.nan)
    accuracy = next((float(v) for name, v in logged.items() if "acc" in name.lower()), math.nan)
    return Evaluation(total / reported if reported else loss_named, accuracy, examples)


def full_gradient(trainer: pl.Trainer, federation: Federation) -> Tensor:
    """Gradient of the weighted mean of the clients' losses at the model the module holds."""
    module, data = trainer.lightning_module, trainer.datamodule
    population = sum(federation.weights.values())
    step = _step(module, "train")
    if step is None:
        raise ValueError(
            f"{type(module).__name__} reports no loss to differentiate: with manual optimisation, give it a"
            " validation_step that returns the loss, or leave gradient_mapping off."
        )
    gradient = torch.zeros_like(federation.x0)
    params = [p for p in module.parameters() if p.requires_grad]
    buffers = clones(buffers_of(module))
    with measuring(trainer), torch.enable_grad():
        trainer.fit_loop.epoch_loop._results = RoundResults(training=True)
        for cid, weight in federation.weights.items():
            for batch_idx, batch in enumerate(data.client_eval_dataloader(cid, "train")):
                batch = move_batch(trainer, batch)
                loss = _loss(_call(trainer, step, batch, batch_idx))
                share = weight / population * batch_size_of(batch) / data.num_examples(cid)
                grads = torch.autograd.grad(loss * share, params, allow_unused=True)
                filled = [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
                gradient += federation.layout.flatten(dict(zip(federation.layout.names, filled, strict=True)))
    restore_buffers(module, buffers)
    return gradient


@contextmanager
def measuring(trainer: pl.Trainer) -> Iterator[None]:
    """Evaluation mode without gradients, in which nothing that training has logged or counted is touched."""
    module, loop, connector = trainer.lightning_module, trainer.fit_loop.epoch_loop, trainer._logger_connector
    results, current_fx, fx_name = loop._results, connector._current_fx, module._current_fx_name
    modes = {m: m.training for m in module.modules()}
    metrics = {m: {k: list(v) if isinstance(v, list) else v for k, v in vars(m).items()} for m in _metrics_of(module)}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        for metric, saved in metrics.items():
            vars(metric).update(saved)
        loop._results, connector._current_fx, module._current_fx_name = results, current_fx, fx_name


def _metrics_of(module: pl.LightningModule) -> list[Metric]:
    return [m for m in module.modules() if isinstance(m, Metric)]


def _step(module: pl.LightningModule, split: str) -> str | None:
    """The step whose loss is f_i: on training data what is optimised, on held-out data what validates it."""
    training = ["training_step"] if module.automatic_optimization else []
    order = [*training, "validation_step"] if split == "train" else ["validation_step", "test_step", *training]
    return next((name for name in order if is_overridden(name, module)), None)


def _call(trainer: pl.Trainer, step: str, batch: Any, batch_idx: int) -> Any:
    wants_index = is_param_in_hook_signature(getattr(trainer.lightning_module, step), "batch_idx", min_args=2)
    return call_strategy_hook(trainer, step, *([batch, batch_idx] if wants_index else [batch]))


def _loss(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    return output.get("loss") if isinstance(output, dict) else None
