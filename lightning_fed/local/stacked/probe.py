"""Try a training step before the first round, to tell the user in plain words why it cannot be stacked.

Correctness does not depend on this trial: docs/speed.md has the contract of a stackable step. The trial runs on a copy
of the module and finds the common breaches of the contract.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)


def try_out(stacked: StackedLocal, work: LocalWork, round: int, cohort: Sequence[ClientId]) -> None:
    """Run the first batch of a client without ``torch.func`` and under it; raises `UnfitError`."""
    twin, loss = stacked.loss.step.twin, stacked.loss
    _check_layers(twin)
    visit = Visit(round, cohort[0], 0, len(cohort))
    plan = Plan.all_of(stacked.trainer, work, [visit])[0]
    named = dict(stacked.trainer.lightning_module.named_parameters())
    params = [named[name].detach().clone() for name in stacked.layout.names]
    (*data,) = Batches([plan], stacked.trainer.precision_plugin.convert_input, params[0], {}).take([slice(1)])
    batch = [part[0, : plan.sizes[0]].clone() for part in data]
    shared = [tensor.clone() for tensor in loss.shared()]
    with _unchanged(stacked, shared):
        try:
            own, _, _ = loss.alone(params, shared, batch)
        except UnfitError:
            raise
        except Exception as error:  # a user's step may raise any error; training repeats it with the client's name
            log.info("A trial of the training step failed: %s: %s", type(error).__name__, error)
            return
        try:
            loss([p.unsqueeze(0) for p in params], shared, [part.unsqueeze(0) for part in batch])
        except UnfitError:
            raise
        except Exception as error:  # the step works without torch.func, and torch.func has no common error class
            raise UnfitError(_in_plain_words(error)) from error
    stacked.check_gradients(own)


def _check_layers(module: nn.Module) -> None:
    """Refuse layers that are known to draw random numbers or to change their buffers."""
    for name, part in module.named_modules():
        what = f"{type(part).__name__} ({name})"
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training:
            raise UnfitError(f"{what} draws random numbers")
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats and part.training:
            raise UnfitError(f"{what} changes its running statistics in every step")


def _in_plain_words(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    if "random" in text:  # torch.func's messages advise options of vmap, which the user does not call
        return "it draws random numbers"
    if ".item()" in text or "data-dependent control flow" in text:
        return "it turns a tensor into a number, or decides by its value"
    return f"it does not work under torch.func: {type(error).__name__}: {text}"[:300]


@contextmanager
def _unchanged(stacked: StackedLocal, shared: Sequence[Tensor]) -> Iterator[None]:
    """Refuse a step that draws random numbers, or changes the module or tensors that clients share."""
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
