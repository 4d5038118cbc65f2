"""A courtesy before the first round: tell why a module's steps cannot be stacked, in plain words.

No number rests on it. What a step may do is a contract (docs/speed.md); the trial runs on a copy of the module and
finds the common breaches of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.core.layout import buffers_of, clones
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.local.stacked.batches import Batches, Plan
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.local.stacked.solver import StackedLocal
from lightning_fed.trainer.hooks import Visit
from lightning_fed.trainer.module_state import Attributes


def try_out(stacked: StackedLocal, work: LocalWork, round: int, cohort: Sequence[ClientId]) -> None:
    """Compare the first batch of a client under ``torch.func`` with the same step without; raises `UnfitError`."""
    twin, loss = stacked.loss.step.twin, stacked.loss
    _check_layers(twin)
    visit = Visit(round, cohort[0], 0, len(cohort))
    plan = Plan.all_of(stacked.trainer, work, [visit])[0]
    named = dict(stacked.trainer.lightning_module.named_parameters())
    params = [named[name].detach().clone() for name in stacked.layout.names]
    (*data,) = Batches([plan], stacked.convert, params[0], {}).take([slice(1)])
    batch = [part[0, : plan.sizes[0]].clone() for part in data]
    shared = [tensor.clone() for tensor in loss.shared()]
    with _unchanged(stacked, shared):
        try:
            own, _, _ = loss.alone(params, shared, batch)
        except UnfitError:
            raise
        except Exception:  # bad data, or a step that fails: training tells, and names the client
            return
        try:
            found, _, _ = loss([p.unsqueeze(0) for p in params], shared, [part.unsqueeze(0) for part in batch])
        except UnfitError:
            raise
        except Exception as error:  # torch.func has many ways to refuse what a step does
            raise UnfitError(_in_plain_words(error)) from error
    stacked.check_gradients(own)
    if differing := _differing(dict(zip(stacked.layout.names, zip(found, own, strict=True), strict=True))):
        raise UnfitError(f"it has another gradient under torch.func than without ({differing})")


def _differing(gradients: dict[str, tuple[Tensor, Tensor | None]]) -> str | None:
    """The parameter whose gradients differ by more than rounding, measured by the largest entry of all of them."""
    own = [theirs for _, theirs in gradients.values() if theirs is not None]
    scale = max((float(theirs.abs().max()) for theirs in own if theirs.numel()), default=0.0)
    if not math.isfinite(scale):
        return None  # bad data: training names the client
    for name, (ours, theirs) in gradients.items():
        tolerance = max(scale, 1.0) * float(torch.finfo(ours.dtype).eps) ** 0.6
        if theirs is not None and not torch.allclose(ours[0], theirs, rtol=0, atol=tolerance):
            return name
    return None


def _check_layers(module: nn.Module) -> None:
    """Refuse layers that are known to draw or to remember."""
    for name, part in module.named_modules():
        what = f"{type(part).__name__} ({name})"
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training:
            raise UnfitError(f"{what} draws random numbers")
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats and part.training:
            raise UnfitError(f"{what} changes its running statistics in every step")


def _in_plain_words(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    if "random" in text:
        return "it draws random numbers"
    if ".item()" in text or "data-dependent control flow" in text:
        return "it turns a tensor into a number, or decides by its value"
    return f"it does not work under torch.func: {type(error).__name__}: {text}"[:300]


@contextmanager
def _unchanged(stacked: StackedLocal, shared: Sequence[Tensor]) -> Iterator[None]:
    """Refuse a step that draws random numbers or leaves traces in the module or in tensors that clients share."""
    twin = stacked.loss.step.twin
    attributes, streams = Attributes(twin, outside=[stacked.loss.step]), _streams()
    buffers, before_step = clones(buffers_of(twin)), [tensor.clone() for tensor in shared]
    yield
    if _streams() != streams:
        raise UnfitError("it draws random numbers")
    if name := attributes.first_change():
        raise UnfitError(f"it changes {type(twin).__name__}.{name}")
    replaced = any(name not in buffers or not torch.equal(buffers[name], now) for name, now in buffers_of(twin).items())
    if replaced or not all(map(torch.equal, shared, before_step)):
        raise UnfitError("it changes buffers")


def _streams() -> tuple[Any, ...]:
    legacy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), legacy[1].tobytes(), legacy[2], random.getstate()
