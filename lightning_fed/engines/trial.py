"""Whether clients of a module can be stacked: found out on a batch of some clients before the first round."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fed.attributes import changed, remember, restore
from lightning_fed.local.functional import Notes, Outline, UnfitError, close
from lightning_fed.local.plan import Blocks, Plan
from lightning_fed.local.stack import Stack, is_plain
from lightning_fed.local.stacked import StackedLocal
from lightning_fed.randomness import torch_generator
from lightning_fed.store import ClientId
from lightning_fed.vector import buffers_of, clones, restore_buffers
from lightning_fed.visit import Visit

if TYPE_CHECKING:
    from lightning_fed.server import FederatedServer

#: Clients whose batches are tried out.
TRIED = 2
#: Clients whose samples are pooled, the most samples in the pool, and their bytes.
POOLED, SAMPLES, SAMPLE_BYTES = 16, 256, 2**23
#: How far from the first model the loss of the pool is looked at too, beside the size of each parameter.
DISTANCES = (0.0, 0.3, 1.0, 3.0, 10.0)


def try_out(stacked: StackedLocal, server: FederatedServer, cohort: Sequence[ClientId]) -> None:
    """Compare first batches of clients, and mixtures of them, with the module's own steps; raises :class:`UnfitError`.

    Mixtures, because a client may hold so few samples or labels that no loss could be told from a mean.
    """
    trainer, module = stacked.trainer, stacked.trainer.lightning_module
    visits = [Visit(server.rounds_done, cid, i, len(cohort)) for i, cid in enumerate(cohort[:TRIED])]
    named = dict(module.named_parameters())
    params = [named[name] for name in stacked.layout.names]
    start = [p.detach().expand(len(visits), *p.shape).clone() for p in params]
    try:
        with _untouched(module):
            plans = [Plan.of(trainer, server, visit) for visit in visits]
            block = next(iter(Blocks(plans, len(plans), stacked.convert, params[0])))
            batches = [first_batch(plan, stacked) for plan in plans]
            seen = [_Seen.of(stacked, start, block.batch(0), block.weights[0], batches)]
            mixed = [part.transpose(0, 1).reshape(part.shape) for part in block.batch(0)]
            even = torch.full_like(block.weights[0], 1 / block.weights.shape[-1])
            batches = [[part[i] for part in mixed] for i in range(len(plans))]
            seen.append(_Seen.of(stacked, start, mixed, even, batches))
            is_mean = _is_mean(stacked, _pool(stacked, server, cohort), params)
    except UnfitError:
        raise
    except Exception as error:
        raise UnfitError(f"training_step does not work under torch.func: {_first_line(error)}") from error
    for each in seen:
        each.compare(stacked)
    if not is_mean:
        raise UnfitError("the loss of a batch is not the mean over its samples")


def _pool(stacked: StackedLocal, server: FederatedServer, cohort: Sequence[ClientId]) -> list[Tensor]:
    """Samples of several clients: rare labels may make a difference that first batches do not show."""
    visits = [Visit(server.rounds_done, cid, i, len(cohort)) for i, cid in enumerate(cohort[:POOLED])]
    plans = Plan.all_of(stacked.trainer, server, visits)
    each = sum(tensor[:1].numel() * tensor.element_size() for tensor in plans[0].loader.tensors)
    share = max(1, min(SAMPLES, SAMPLE_BYTES // max(1, each)) // len(plans))
    drawn = []
    for plan in (plan for plan in plans if _kind(plan) == _kind(plans[0])):
        tensors = [tensor[plan.rows.flatten()[:share]] for tensor in plan.loader.tensors]
        drawn.append(stacked.convert(tensors if plan.loader.transform is None else plan.loader.transform(tensors)))
    return [torch.cat(parts) for parts in zip(*drawn, strict=True)]


def _kind(plan: Plan) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape[1:], tensor.dtype) for tensor in plan.loader.tensors]


def _is_mean(stacked: StackedLocal, pool: list[Tensor], params: Sequence[Tensor]) -> bool:
    """At the first model, and at others: a loss may be a mean only as long as it is large, or small."""
    noise = torch_generator("trial")
    for distance in DISTANCES:
        far = [p.detach() + distance * max(float(p.detach().abs().mean()), 0.1) * _normal(p, noise) for p in params]
        try:
            with torch.enable_grad():
                if not stacked.loss.is_mean(far, pool):
                    return False
        except UnfitError:
            raise
        except Exception:
            return True  # bad data, whose client training will name, or a step that refuses such models
    return True


def _normal(like: Tensor, noise: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=noise, dtype=torch.float64).to(like)


def first_batch(plan: Plan, stacked: StackedLocal) -> Any:
    """As the client's loader gives it."""
    tensors = [tensor[plan.rows[0, : plan.sizes[0]]] for tensor in plan.loader.tensors]
    return stacked.convert(tensors if plan.loader.transform is None else plan.loader.transform(tensors))


@dataclass(frozen=True, eq=False)
class _Seen:
    """Gradients and notes of a stack of batches, and those of the module's own steps on them."""

    found: Stack
    noted: list[Tensor]
    outline: Outline
    weights: Tensor
    own: list[tuple[Sequence[Tensor | None], Notes]]

    @classmethod
    def of(
        cls, stacked: StackedLocal, start: Stack, batch: list[Tensor], weights: Tensor, batches: Sequence[Any]
    ) -> _Seen:
        found, _, noted = stacked.loss(start, stacked.loss.shared(), batch, weights)
        return cls(found, noted, stacked.loss.outline, weights, [_own_step(stacked, own) for own in batches])

    def compare(self, stacked: StackedLocal) -> None:
        plain = is_plain(stacked.trainer.optimizers[0])
        for i, (gradient, notes) in enumerate(self.own):
            for name, ours, theirs in zip(stacked.layout.names, self.found, gradient, strict=True):
                if theirs is None and not plain:
                    raise UnfitError(f"{name} has no gradient, but the optimiser might move it")
                if not close(ours[i], torch.zeros_like(ours[i]) if theirs is None else theirs):
                    raise UnfitError(f"the loss of a batch is not the mean over its samples (gradient of {name})")
            _compare_notes(self.outline, [part[i] for part in self.noted], self.weights[i], notes)


def _own_step(stacked: StackedLocal, batch: Any) -> tuple[Sequence[Tensor | None], Notes]:
    module, notes = stacked.trainer.lightning_module, Notes()
    named = dict(module.named_parameters())
    with torch.enable_grad(), notes.taken(module):
        output = stacked.loss.step(batch)
        loss = output["loss"] if isinstance(output, Mapping) else output
        return torch.autograd.grad(loss, [named[name] for name in stacked.layout.names], allow_unused=True), notes


def _compare_notes(outline: Outline, noted: Sequence[Tensor], weights: Tensor, notes: Notes) -> None:
    """What one client's samples logged, one by one, with what its batch logged."""
    size = int((weights > 0).sum())
    samples = iter([part[:size] for part in noted])
    if list(outline.logged) != list(notes.logged) or [m for m, _ in outline.updates] != [m for m, _ in notes.updates]:
        raise UnfitError("training_step logs other things for a sample than for a batch")
    for name, (value, _) in notes.logged.items():
        mean = next(samples).float().mean() if name in outline.computed else outline.logged[name][0]
        same = close(mean, value.detach().float()) if isinstance(value, Tensor) else mean is value or mean == value
        if not same or notes.batch_sizes[name] not in (None, size):
            raise UnfitError(f"what training_step logs as {name!r} is not the mean over its samples")
    for metric, args in notes.updates:
        if any(isinstance(default, list) for default in metric._defaults.values()):
            raise UnfitError(f"{type(metric).__name__} keeps what it is given, and may look at it batch by batch")
        whole, parts = copy.deepcopy(metric), copy.deepcopy(metric)
        ours = [next(samples) for _ in args]
        whole.update(*(arg.detach() for arg in args))
        for row in zip(*ours, strict=True):
            parts.update(*row)
        for ours_now, theirs in zip(tree_leaves(parts.metric_state), tree_leaves(whole.metric_state), strict=True):
            if ours_now.shape != theirs.shape or not close(ours_now.float(), theirs.float()):
                raise UnfitError(f"{type(metric).__name__} is not updated sample by sample")


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
