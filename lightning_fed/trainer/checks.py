"""Refuse settings that a federated fit cannot run, before any work is done."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.lightning import (
    BatchSizeFinder,
    DDPStrategy,
    LearningRateFinder,
    ModelPruning,
    SingleDeviceStrategy,
    StochasticWeightAveraging,
    check_lightning_version,
    is_overridden,
    is_param_in_hook_signature,
    pl,
)
from lightning_fed.lightning.mixtures import check_origin, foreign_base
from lightning_fed.lightning.package import TRAINER
from lightning_fed.sampling import Sampler
from lightning_fed.theory.stability import stability_of
from lightning_fed.theory.tolerance import Tolerance
from lightning_fed.trainer.eligibility import why_not_plain
from lightning_fed.trainer.hooks import is_server
from lightning_fed.trainer.strategy import FederatedStrategy


def check_setup(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    algorithm: Algorithm[Any, Any, Any],
    sampler: Sampler,
    work: LocalWork,
) -> None:
    """Check everything that is known before the model is set up."""
    check_lightning_version()
    check_trainer(trainer)
    _check_module(module)
    _check_data(trainer.datamodule)
    _check_sampler(trainer.datamodule.client_ids, algorithm, sampler)
    _check_batches(trainer.datamodule, work)
    _warn_of_instability(trainer.datamodule, algorithm, sampler)


def check_packages(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse parts of the other Lightning package, on which ``isinstance`` fails later and without a word.

    A callback that derives from nothing but the other package's ``Callback``, such as Optuna's, has only hooks. These
    work in either Trainer, so that it is let pass.
    """
    check_origin(trainer, "Trainer")
    check_origin(module, "module")
    for callback in trainer.callbacks:
        base = foreign_base(type(callback))
        if base is not None and (base.__name__ != "Callback" or base is type(callback)):
            check_origin(callback, "callback")
    for logger in trainer.loggers:
        check_origin(logger, "logger")


def check_trainer(trainer: pl.Trainer) -> None:
    check_origin(trainer, "Trainer")
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(f"FederatedServer works on {TRAINER}.Trainer, got {type(trainer).__qualname__}.")
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy, FederatedStrategy):
        raise ValueError(
            "FederatedServer gives every process a whole model, got strategy"
            f' {type(trainer.strategy).__name__}. Use Trainer(strategy="federated", devices=...), or'
            ' Trainer(devices=1, strategy="auto").'
        )
    if sum(map(is_server, trainer.callbacks)) > 1:
        raise ValueError("The trainer has more than one FederatedServer; keep one.")
    for refused in (LearningRateFinder, BatchSizeFinder, StochasticWeightAveraging, ModelPruning):
        if any(isinstance(callback, refused) for callback in trainer.callbacks):
            raise ValueError(
                f"{refused.__name__} drives Lightning's own epochs and does not fit rounds. Remove it from callbacks."
            )


def _check_module(module: pl.LightningModule) -> None:
    if not is_overridden("training_step", module):
        raise ValueError(f"{type(module).__name__} has no training_step, so clients cannot train it.")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{type(module).__name__}.training_step takes a dataloader_iter; clients' batches come one by one."
            " Write training_step(self, batch, batch_idx)."
        )
    built_later = is_overridden("configure_model", module) or is_overridden("setup", module)
    if not built_later and not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has no trainable parameters, so there is nothing to federate."
            " Give it parameters with requires_grad=True."
        )


def _check_data(data: Any) -> None:
    if not isinstance(data, FederatedDataModule):
        got = "no datamodule" if data is None else type(data).__name__
        raise TypeError(
            f"A federated fit needs data split by client: trainer.fit(module, datamodule=FederatedDataModule(...));"
            f" got {got}. FederatedDataModule.from_dataset splits any map-style dataset."
        )


def _check_sampler(ids: list[ClientId], algorithm: Algorithm[Any, Any, Any], sampler: Sampler) -> None:
    sampler.check(len(ids))
    if algorithm.traits.everybody and sampler.inclusion_probabilities(len(ids)).min() < 1:
        raise ValueError(
            f"{type(algorithm).__name__} needs every client in every round, but {sampler} leaves some out. Omit"
            " clients_per_round, or use FedADMM or FedDR."
        )


def _check_batches(data: FederatedDataModule, work: LocalWork) -> None:
    for cid in data.client_ids:
        if data.num_examples(cid) < 1:
            raise ValueError(f"Client {cid!r} has no training samples. Leave it out of the federation.")
    own_batches = is_overridden("client_dataloader", data, FederatedDataModule)
    if work.steps is None and data.drop_last and data.sampler is None and not own_batches:
        small = next((cid for cid in data.client_ids if data.num_examples(cid) < data.batch_size), None)
        if small is not None:
            raise ValueError(
                f"Client {small!r} has {data.num_examples(small)} samples, less than one batch of {data.batch_size},"
                " and drop_last=True would leave its epochs without batches. Use drop_last=False, a smaller batch_size,"
                " or local_steps, whose batches are never short."
            )


def _warn_of_instability(data: FederatedDataModule, algorithm: Algorithm[Any, Any, Any], sampler: Sampler) -> None:
    """Warn of dual and server steps that this sampling and these weights may not bear."""
    if algorithm.dual_steps is None:
        return
    weights = [algorithm.weight(data.num_examples(cid)) for cid in data.client_ids]
    found = stability_of(algorithm.dual_steps, weights, sampler)
    if not found.safe:
        warnings.warn(
            f"{type(algorithm).__name__} may diverge with ab = dual step * server step = {found.ab:.3g}:"
            f" {found.reason(data.client_ids[found.client])} (docs/primal_dual.md). Use {', or '.join(found.cures)}.",
            stacklevel=2,
        )


def _check_sgd(trainer: pl.Trainer, why: str, momentum: bool = False) -> None:
    """Refuse local steps other than ``x - lr * gradient``, and with ``momentum`` other than those of SGD."""
    found = None
    if not trainer.lightning_module.automatic_optimization:
        found = "manual optimisation"
    elif len(trainer.optimizers) != 1:
        found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
    elif reason := why_not_plain(trainer.optimizers[0], decay=True, momentum=momentum):
        found = reason
    elif trainer.gradient_clip_val:
        found = "gradient clipping"
    if found:
        kind = "SGD" if momentum else "plain SGD"
        raise ValueError(f"Local steps must be {kind} with one learning rate, got {found}. {why}")


def check_tolerance(tolerance: Tolerance | None, algorithm: Algorithm[Any, Any, Any]) -> None:
    """Refuse a tolerance for an algorithm whose local problem has no minimiser to approximate."""
    if tolerance is None:
        return
    if algorithm.traits.plain_sgd is not None:
        raise ValueError(
            f"{type(algorithm).__name__} asks for local steps, not for a minimiser, so local_tolerance={tolerance} has"
            f" no minimiser to compare with. Omit local_tolerance. ({algorithm.traits.plain_sgd})"
        )
    tolerance.limit(0, algorithm.traits.penalty, 1.0)


def check_optimizers(trainer: pl.Trainer, algorithm: Algorithm[Any, Any, Any]) -> None:
    """Refuse optimisers and schedulers that the algorithm's penalty or local steps do not allow."""
    if any(config.interval == "step" and config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise ValueError(
            "ReduceLROnPlateau with interval 'step' reads a metric after every local step, but metrics of a"
            " federation exist once per round. Use interval 'epoch'."
        )
    if algorithm.traits.plain_sgd is not None:
        _check_sgd(trainer, algorithm.traits.plain_sgd)
    if algorithm.traits.sgd is not None:
        _check_sgd(trainer, algorithm.traits.sgd, momentum=True)
    decays = {float(group.get("weight_decay", 0.0)) for o in trainer.optimizers for group in o.param_groups} - {0.0}
    if decays and algorithm.traits.no_weight_decay is not None:
        raise ValueError(
            f"Local steps must have no weight_decay, got {max(decays):g}. {algorithm.traits.no_weight_decay}"
        )
    scaled, penalty = getattr(trainer.precision_plugin, "scaler", None) is not None, algorithm.traits.penalty
    for optimizer in trainer.optimizers:
        name = type(optimizer).__name__
        if scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"{name}(fused=True) with a GradScaler still holds scaled gradients when the penalty is added."
                ' Use fused=False, or precision="bf16-mixed".'
            )
        if any(group.get("line_search_fn") for group in optimizer.param_groups):
            raise ValueError(
                f"{name} searches along the plain loss, without the algorithm's penalty. Use line_search_fn=None."
            )
        lr = max((float(group.get("lr", 0.0)) for group in optimizer.param_groups), default=0.0)
        if name == "SGD" and lr * penalty >= 2:
            warnings.warn(
                f"lr * penalty = {lr:g} * {penalty:g} >= 2: plain gradient steps on the augmented Lagrangian diverge."
                f" Use a learning rate below {2 / penalty:g}.",
                stacklevel=2,
            )


def check_resumed(loop_state: Any, restored: Mapping[str, Any] | None, seed: int) -> None:
    """Refuse to go on from a checkpoint that is not of this run.

    Args:
        loop_state: of the federated loop, in the checkpoint.
        restored: state of the server, in the checkpoint.
        seed: of this run.
    """
    if loop_state is None:
        raise ValueError(
            "The checkpoint was not made by a federated fit: it has no server and client states to resume from."
            " Load its weights into the module (load_from_checkpoint) and start a federation without ckpt_path."
        )
    if restored is None:
        raise ValueError(
            "The checkpoint holds weights only, without server and client states, so the fit cannot go on from it."
            " Save with ModelCheckpoint(save_weights_only=False)."
        )
    if restored["seed"] != seed:
        raise ValueError(
            f"The checkpoint was made with seed {restored['seed']}, this run has seed {seed}: it would"
            f" not be the same run. Use FederatedServer(seed={restored['seed']})."
        )
