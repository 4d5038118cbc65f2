"""Whether clients of a module can be stacked: found out on a batch of two clients before the first round."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_fed.attributes import changed, remember, restore
from lightning_fed.local.functional import Notes, UnfitError
from lightning_fed.local.plan import Blocks, Plan
from lightning_fed.local.stacked import StackedLocal
from lightning_fed.store import ClientId
from lightning_fed.vector import buffers_of, clones, restore_buffers
from lightning_fed.visit import Visit

if TYPE_CHECKING:
    from lightning_fed.server import FederatedServer


def try_out(stacked: StackedLocal, server: FederatedServer, cohort: Sequence[ClientId]) -> None:
    """Compare the first batch of two clients, stacked, with the module's own steps; raises :class:`UnfitError`."""
    trainer, module = stacked.trainer, stacked.trainer.lightning_module
    visits = [Visit(server.rounds_done, cid, i, 2) for i, cid in enumerate(cohort[:2])]
    named = dict(module.named_parameters())
    params = [named[name] for name in stacked.layout.names]
    try:
        with _untouched(module):
            plans = [Plan.of(trainer, server, visit) for visit in visits]
            block = next(iter(Blocks(plans, len(plans), stacked.convert, params[0])))
            found, _, _ = stacked.loss(
                [p.detach().expand(len(plans), *p.shape).clone() for p in params],
                stacked.loss.shared(),
                block.batch(0),
                block.weights[0],
            )
            expected = [_gradient(stacked, module, first_batch(plan, stacked), params) for plan in plans]
    except UnfitError:
        raise
    except Exception as error:
        raise UnfitError(f"training_step does not work under torch.func: {_first_line(error)}") from error
    for i, gradient in enumerate(expected):
        for name, ours, theirs in zip(stacked.layout.names, found, gradient, strict=True):
            scale = max(float(theirs.abs().max()), 1e-30)
            if not torch.allclose(ours[i], theirs, rtol=0, atol=scale * float(torch.finfo(theirs.dtype).eps) ** 0.6):
                raise UnfitError(f"the loss of a batch is not the mean over its samples (gradient of {name})")


def first_batch(plan: Plan, stacked: StackedLocal) -> Any:
    """As the client's loader gives it."""
    tensors = [tensor[plan.rows[0, : plan.sizes[0]]] for tensor in plan.loader.tensors]
    return stacked.convert(tensors if plan.loader.transform is None else plan.loader.transform(tensors))


def _gradient(
    stacked: StackedLocal, module: pl.LightningModule, batch: Any, params: list[nn.Parameter]
) -> list[Tensor]:
    step = stacked.loss.step
    with torch.enable_grad(), Notes().taken(module):
        output = step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        gradient = torch.autograd.grad(loss, params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, gradient, strict=True)]


class _Watched:
    """Stands for the trainer: a recorded step would hold fast what it sees there."""

    def __getattr__(self, name: str) -> Any:
        raise UnfitError(f"training_step looks at the trainer ({name})")


@contextmanager
def _untouched(module: pl.LightningModule) -> Iterator[None]:
    """Refuses a training step that leaves traces or draws random numbers; afterwards the module is as before."""
    attributes = {part: remember(part) for part in module.modules()}
    buffers, draws = clones(buffers_of(module)), _streams()
    trainers = {part: vars(part)["_trainer"] for part in module.modules() if isinstance(part, pl.LightningModule)}
    for watched in trainers:
        vars(watched)["_trainer"] = _Watched()
    try:
        yield
        for watched, trainer in trainers.items():
            vars(watched)["_trainer"] = trainer
        if _streams() != draws:
            raise UnfitError("training_step draws random numbers")
        for part, before in attributes.items():
            if key := changed(part, before):
                raise UnfitError(f"training_step changes {type(part).__name__}.{key}")
        if any(not torch.equal(buffers[name], now) for name, now in buffers_of(module).items()):
            raise UnfitError("training_step changes buffers")
    finally:
        for watched, trainer in trainers.items():
            vars(watched)["_trainer"] = trainer
        for part, before in attributes.items():
            restore(part, before)
        restore_buffers(module, buffers)


def _streams() -> tuple[Any, ...]:
    legacy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), legacy[1].tobytes(), legacy[2], random.getstate()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
