"""Measure a model on clients' data without changing the training run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_fed.core.layout import Layout
from lightning_fed.core.memory import ClientId
from lightning_fed.data.datamodule import SPLITS
from lightning_fed.data.loading import counted
from lightning_fed.evaluation.by_sample import MANY, Models, evaluate_together
from lightning_fed.evaluation.logged import evaluation_of, reset_metrics
from lightning_fed.evaluation.personal import as_client, federation_of, personal_models
from lightning_fed.evaluation.results import ClientEvaluations, Evaluation
from lightning_fed.lightning import (
    batch_size_of,
    call_strategy_hook,
    collect_rng_states,
    current_hook,
    is_overridden,
    is_param_in_hook_signature,
    isolate_rng,
    pl,
    results_of,
    set_current_hook,
    set_results,
    set_rng_states,
)
from lightning_fed.local.stacked.stack import unfavourable
from lightning_fed.theory.residuals import gradient_mapping
from lightning_fed.trainer.batches import move_batch
from lightning_fed.trainer.clock import local_time
from lightning_fed.trainer.data_streams import undisturbed
from lightning_fed.trainer.declarations import declares
from lightning_fed.trainer.loops import RoundResults
from lightning_fed.trainer.module_state import ModuleState, restore_state
from lightning_fed.trainer.ranks import ranks_of

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation

log = logging.getLogger(__name__)

#: Maps a loss and the parameters to one tensor per parameter.
Derivative = Callable[[Tensor, list[nn.Parameter]], Sequence[Tensor | None]]
FIRST: Derivative = partial(torch.autograd.grad, allow_unused=True)

_TRAIN_MODE_ONLY: WeakSet[nn.Module] = WeakSet()  # modules whose training_step does not work in evaluation mode


class EvaluationError(RuntimeError):
    """A client's data could not be evaluated; the message names the client, the cause is chained."""


def evaluate_splits(
    trainer: pl.Trainer, left_out: Container[ClientId] = (), splits: Sequence[str] = SPLITS
) -> dict[str, ClientEvaluations]:
    """Evaluate the module's model on every client's train, validation and test data, as far as there are any.

    Clients that are ``left_out`` are no part of the federation any more.
    """
    data: Any = trainer.datamodule
    with measuring(trainer) as state:
        found = {}
        for split in (split for split in splits if data.has_split(split)):
            ids = [cid for cid in data.split_ids(split) if cid not in left_out]
            found[split] = ClientEvaluations(_evaluate_all(trainer, split, ids, state))
        return found


def evaluate_outside_fit(
    trainer: pl.Trainer, split: str, left_out: Container[ClientId] = ()
) -> dict[str, ClientEvaluations]:
    """Evaluate one split by client in Lightning's ``validate`` or ``test``, whose own results stay as they are."""
    stage = trainer.state.stage
    trainer.training = True  # the module then logs to the results that `measuring` sets aside
    try:
        return evaluate_splits(trainer, left_out, (split,))
    finally:
        trainer.state.stage = stage


def client_losses(trainer: pl.Trainer, split: str, ids: Sequence[ClientId]) -> dict[ClientId, float]:
    """Loss of the module's model on the data of some clients; NaN if the module reports none."""
    with measuring(trainer) as state:
        return {cid: found.loss for cid, found in _evaluate_all(trainer, split, ids, state).items()}


def _evaluate_all(
    trainer: pl.Trainer, split: str, ids: Sequence[ClientId], state: ModuleState
) -> dict[ClientId, Evaluation]:
    alone = partial(_evaluate, trainer, split=split, state=state)
    if (federation := federation_of(trainer)) is not None and federation.first:
        models = personal_models(federation, lambda cid: state.parameters)
        together = None if state.buffers else _evaluate_together(trainer, split, ids, models)
        return together or _by_rank(trainer, ids, lambda cid: alone(cid, own=federation.part_of(cid)))
    return _evaluate_together(trainer, split, ids) or _by_rank(trainer, ids, alone)


def _by_rank(
    trainer: pl.Trainer, ids: Sequence[ClientId], evaluate: Callable[[ClientId], Evaluation | None]
) -> dict[ClientId, Evaluation]:
    """Evaluate clients one by one, each in one of the processes of the run; all get all results, in this order.

    Every client begins with the same random state, and is evaluated by the same step, whoever came before it.
    """
    ranks, module, drawn = ranks_of(trainer), trainer.lightning_module, collect_rng_states()

    def share() -> dict[ClientId, Evaluation]:
        found = {}
        for cid in ranks.share(ids):
            set_rng_states(drawn)
            if (result := evaluate(cid)) is not None:
                found[cid] = result
        set_rng_states(drawn)
        return found

    while True:
        known = module in _TRAIN_MODE_ONLY
        told = ranks.together(lambda: (share(), module in _TRAIN_MODE_ONLY))
        if known or not any(failed for _, failed in told):
            parts = {cid: result for part, _ in told for cid, result in part.items()}
            return {cid: parts[cid] for cid in ids if cid in parts}
        _TRAIN_MODE_ONLY.add(module)  # in all processes


def _evaluate_together(
    trainer: pl.Trainer,
    split: str,
    ids: Sequence[ClientId],
    models: Models | None = None,
) -> dict[ClientId, Evaluation] | None:
    """Evaluate many clients of a small model together, sample by sample; None if the module does not declare both:

    ``stackable``, a step is a function of batch, parameters and buffers; ``loss_is_mean``, it treats every sample by
    itself (docs/speed.md). None also, with the reason in the log, if the step logs what is no mean or sum over samples.
    """
    module = trainer.lightning_module
    step = loss_step(module, split)
    if len(ids) < MANY or step is None or unfavourable(module):
        return None
    if not all(declares(module, contract, step) for contract in ("stackable", "loss_is_mean")):
        return None
    try:
        return evaluate_together(trainer, step, split, ids, models)
    except Exception as error:  # a user's step may raise anything; one by one it is raised again, if it was genuine
        _tell_once(f"{type(error).__name__}: {error}")
        return None


@cache
def _tell_once(reason: str) -> None:
    log.info("Clients are evaluated one by one: %s", reason)


def evaluate_own(trainer: pl.Trainer, federation: Federation, split: str) -> dict[ClientId, Evaluation]:
    """Evaluate each visited client's own model on its own data, if the algorithm keeps one.

    States are recalled one at a time, or one stack at a time: those of all clients together may not fit in memory.
    """
    algorithm, store = federation.algorithm, federation.store
    if algorithm.local_model(federation.fresh()) is None:  # a client's state has the same variables after any visit
        return {}
    known = [cid for cid in trainer.datamodule.split_ids(split) if cid in federation.weights]
    seen = [cid for cid in known if (summary := store.summary(cid)) is not None and summary.visits]

    def model_of(cid: ClientId) -> Tensor | None:
        return algorithm.local_model(federation.recall(cid))

    def parameters_of(cid: ClientId) -> Mapping[str, Tensor] | None:
        return None if (x_i := model_of(cid)) is None else federation.layout.split(x_i)

    def alone(cid: ClientId, state: ModuleState) -> Evaluation | None:
        if (shared := parameters_of(cid)) is None:
            return None
        return _evaluate(trainer, cid, split, state, {**store[cid].buffers, **shared})

    with measuring(trainer) as state:
        models = personal_models(federation, parameters_of)
        together = None if state.buffers else _evaluate_together(trainer, split, seen, models)
        return together or _by_rank(trainer, seen, lambda cid: alone(cid, state))


def full_gradient(trainer: pl.Trainer, federation: Federation) -> Tensor:
    """Gradient of the weighted mean of the clients' losses at the model the module holds, with their personal parts."""
    population = sum(federation.weights.values())
    shares = {cid: weight / population for cid, weight in federation.weights.items()}
    total = torch.zeros_like(federation.x0)
    for cid, share in shares.items():
        try:
            with as_client(trainer, cid):
                total = total + share * client_gradient(trainer, federation.layout, cid)
        except Exception as error:  # a user's step may raise anything
            where = f"The gradient of the loss on the train data of client {cid!r}"
            raise EvaluationError(f"{where}: {type(error).__name__}: {error}") from error
    return total


def stationarity(trainer: pl.Trainer, federation: Federation) -> float:
    """Norm of the gradient mapping at the server's model; computed once between two rounds and then shared."""
    if federation.stationarity is None or federation.stationarity[0] != federation.rounds_done:
        rho = federation.algorithm.traits.penalty or 1.0
        gradient = full_gradient(trainer, federation)
        mapping = gradient_mapping(federation.algorithm, federation.server.x_bar, gradient, rho)
        federation.stationarity = (federation.rounds_done, float(mapping.norm()))
    return federation.stationarity[1]


def client_gradient(trainer: pl.Trainer, layout: Layout, cid: ClientId) -> Tensor:
    """Gradient of a client's loss over all its training data, in evaluation mode, at the model the module holds."""
    return client_derivative(trainer, layout, cid, FIRST)


def client_derivative(trainer: pl.Trainer, layout: Layout, cid: ClientId, derivative: Derivative) -> Tensor:
    """A ``derivative`` of a client's loss, such as the gradient in :func:`client_gradient`, summed over batches.

    ``derivative`` gets the loss and the parameters in the order of ``layout.names``.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    step = loss_step(module, "train")
    if step is None:
        raise ValueError(f"{type(module).__name__} reports no loss to differentiate; see ClientEvaluation.")
    total = torch.zeros(layout.numel, dtype=layout.dtype, device=trainer.strategy.root_device)
    with measuring(trainer), undisturbed(data, cid, "train"), torch.enable_grad():
        set_results(trainer, RoundResults(training=True))
        examples, seen = data.num_examples(cid), 0
        for batch_idx, (batch, size) in enumerate(counted(data.client_eval_dataloader(cid, "train"))):
            batch = move_batch(trainer, batch)
            loss = _loss(_call(trainer, step, batch, batch_idx))
            size = batch_size_of(batch) if size is None else size
            total += _flat(module, layout, derivative, loss * (size / examples))
            seen += size
    return (
        total if seen == examples else total * (examples / seen)
    )  # a user's loader may give another number of samples


def check_differentiable(module: pl.LightningModule, remedy: str) -> None:
    """Refuse a module whose steps return no loss to differentiate."""
    if loss_step(module, "train") is None:
        raise ValueError(
            f"{type(module).__name__} reports no loss to differentiate: with manual optimisation, give it a"
            f" validation_step that returns the loss, or {remedy}."
        )


def batch_gradient(trainer: pl.Trainer, layout: Layout, batch: Any, batch_idx: int, noise: dict[str, Any]) -> Tensor:
    """Gradient of ``training_step`` on its last batch, with the random state from before ``noise`` was drawn."""
    with measuring(trainer, training=True), torch.enable_grad():
        set_results(trainer, RoundResults(training=True))
        set_rng_states(noise)
        loss = _loss(_call(trainer, "training_step", batch, batch_idx))
        return _flat(trainer.lightning_module, layout, FIRST, loss)


def _flat(module: nn.Module, layout: Layout, derivative: Derivative, loss: Tensor) -> Tensor:
    named = dict(module.named_parameters())
    params = [named[name] for name in layout.names]
    parts = zip(layout.names, params, derivative(loss, params), strict=True)
    return layout.flatten({name: torch.zeros_like(p) if part is None else part for name, p, part in parts})


def loss_step(module: pl.LightningModule, split: str) -> str | None:
    """The step whose loss is f_i: the training step on training data, the validation step on held-out data."""
    usable = module.automatic_optimization and module not in _TRAIN_MODE_ONLY
    training = ["training_step"] if usable else []
    order = [*training, "validation_step"] if split == "train" else ["validation_step", "test_step", *training]
    return next((name for name in order if is_overridden(name, module)), None)


@contextmanager
def measuring(trainer: pl.Trainer, training: bool = False) -> Iterator[ModuleState]:
    """Evaluation mode, unless ``training``; restores the module, its metrics, the log and the RNG afterwards."""
    module, results, hook = trainer.lightning_module, results_of(trainer), current_hook(trainer)
    modes = {m: m.training for m in module.modules()}
    if not training:
        module.eval()
    state = ModuleState(module, trainer.optimizers, metrics=True)
    try:
        with isolate_rng(), torch.no_grad(), local_time(trainer):
            yield state
    finally:
        state.restore()
        for m, mode in modes.items():
            m.training = mode
        set_results(trainer, results)
        set_current_hook(trainer, hook)


def _evaluate(
    trainer: pl.Trainer, cid: ClientId, split: str, state: ModuleState, own: Mapping[str, Tensor] | None = None
) -> Evaluation:
    """Evaluate the module's model on one client's data, by another step if training_step cannot be evaluated.

    The module is in ``state`` before and after, so that a client's result does not depend on other clients. ``own``
    holds the client's own parameters and buffers.
    """
    module = trainer.lightning_module
    step = loss_step(module, split)
    if step is None:
        return Evaluation()
    try:
        with restored(state), undisturbed(trainer.datamodule, cid, split):
            if own is not None:
                restore_state(module, {**state.buffers, **own})
            return _evaluate_by(step, trainer, cid, split)
    except Exception as error:  # a training step may fail in any way in evaluation mode; the warning says how
        if step != "training_step":
            where = f"{type(module).__name__}.{step} on the {split} data of client {cid!r}"
            raise EvaluationError(f"{where}: {type(error).__name__}: {error}") from error
        warnings.warn(
            f"{type(module).__name__}.training_step does not work in evaluation mode (client {cid!r}:"
            f" {type(error).__name__}: {error}). Clients are evaluated by its validation_step instead, if it has one.",
            stacklevel=2,
        )
        _TRAIN_MODE_ONLY.add(module)
        return _evaluate(trainer, cid, split, state, own)


@contextmanager
def restored(state: ModuleState) -> Iterator[None]:
    try:
        yield
    finally:
        state.restore()


def _evaluate_by(step: str, trainer: pl.Trainer, cid: ClientId, split: str) -> Evaluation:
    module, data = trainer.lightning_module, trainer.datamodule
    set_results(trainer, results := RoundResults(training=True))
    results.complete = True
    reset_metrics(module)
    total, examples, reported = 0.0, 0, 0
    for batch_idx, (batch, size) in enumerate(counted(data.client_eval_dataloader(cid, split))):
        batch = move_batch(trainer, batch)
        results.batch, results.batch_size = batch, size
        with torch.set_grad_enabled(step == "training_step"):  # training_step may differentiate inside itself
            loss = _loss(_call(trainer, step, batch, batch_idx))
        size = batch_size_of(batch) if size is None else size
        examples += size
        if loss is not None:
            total, reported = total + float(loss.detach()) * size, reported + size
    return evaluation_of(results, module, total / reported if reported else None, cid, examples)


def _call(trainer: pl.Trainer, step: str, batch: Any, batch_idx: int) -> Any:
    function = getattr(trainer.lightning_module, step)
    wants_index = is_param_in_hook_signature(function, "batch_idx", min_args=2)
    # a client's data are those of one loader
    loader = {"dataloader_idx": 0} if is_param_in_hook_signature(function, "dataloader_idx", explicit=True) else {}
    return call_strategy_hook(trainer, step, *([batch, batch_idx] if wants_index else [batch]), **loader)


def _loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    return output.get("loss") if isinstance(output, dict) else None
