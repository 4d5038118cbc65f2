"""Which engine plays the rounds of a fit, and why."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import DoublePrecision, Precision
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn, optim

from lightning_fed.attributes import changed, remember, restore
from lightning_fed.callbacks.base import listening
from lightning_fed.callbacks.progress import FederatedProgressBar
from lightning_fed.engines.fusing import layers_without_gradients
from lightning_fed.lean import needs_hooks
from lightning_fed.local.functional import Notes, UnfitError
from lightning_fed.local.plan import Blocks, Plan
from lightning_fed.local.stack import STACK
from lightning_fed.local.stacked import StackedLocal
from lightning_fed.store import ClientId
from lightning_fed.vector import Layout, buffers_of, clones, restore_buffers
from lightning_fed.visit import Visit

if TYPE_CHECKING:
    from lightning_fed.server import FederatedServer

#: Optimisers that treat every number on its own, so that a stack of models is just a larger model.
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
)

#: Compiling pays if it saves more than this, by a rough model of the time of a step; a cold compiler takes 20 seconds.
COMPILE_SECONDS = 60

#: Above this many parameters a single step keeps the machine busy; stacking only costs memory.
LARGE = 2**18


def not_worth_it(trainer: pl.Trainer, parameters: int, cohort: int) -> str | None:
    """Why stacking clients would not be faster; None if it should be."""
    if cohort < 2:
        return "a round has one client"
    if trainer.strategy.root_device.type == "cpu":
        if parameters > LARGE:
            return f"{parameters:,} parameters keep the machine busy one client at a time"
        if any(isinstance(part, nn.modules.conv._ConvNd) for part in trainer.lightning_module.modules()):
            return "convolutions with weights of their own for each client are slow on a CPU"
    return None


def impossible(trainer: pl.Trainer, server: FederatedServer, layout_dtype: torch.dtype) -> str | None:
    """Why clients cannot be stacked, as far as can be seen without trying."""
    module = trainer.lightning_module
    if reason := needs_hooks(trainer, server):
        return reason
    if type(trainer.precision_plugin) not in (Precision, DoublePrecision):
        return f"precision {trainer.precision} is mixed"
    if len(trainer.optimizers) != 1 or type(trainer.optimizers[0]) not in ELEMENTWISE:
        return f"{', '.join(type(o).__name__ for o in trainer.optimizers)} may mix the clients of a stack"
    trained = {p for group in trainer.optimizers[0].param_groups for p in group["params"] if p.requires_grad}
    if trained != {p for p in module.parameters() if p.requires_grad}:
        return "the optimiser does not train all parameters"
    if any(p.dtype != layout_dtype for p in trained):
        return "parameters have different precisions"
    if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        return "a scheduler steps with every batch"
    if server.local_tolerance is not None:
        return "visits end when their problem is solved well enough"
    if server.buffers == "local" and buffers_of(module):
        return "clients keep buffers of their own"
    for hook in ("on_client_start", "on_client_step"):
        for callback in listening(trainer, hook):
            if not isinstance(callback, FederatedProgressBar):
                return f"{type(callback).__name__} has an {hook} hook"
    return None


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


class Choice:
    """Decides once per model and stays with it, so that equal runs do equal things.

    Args:
        asked: ``auto``, ``sequential`` or ``vectorized``; what was asked for by name and is impossible is an error.
        compile: whether stacked steps are compiled; ``auto`` where the whole run is long enough to pay for it.
    """

    def __init__(self, asked: str, compile: bool | Literal["auto"]) -> None:
        self.asked, self.compile = asked, compile
        self._decided: tuple[Layout, StackedLocal | None] | None = None
        self._layers: tuple[Layout, list[nn.Linear]] | None = None

    def stacked(
        self, trainer: pl.Trainer, server: FederatedServer, layout: Layout, cohort: Sequence[ClientId]
    ) -> StackedLocal | None:
        """Whoever answers for a stack of clients; None if clients are asked one by one."""
        if self._decided is None or self._decided[0] != layout:
            self._decided = layout, self._decide(trainer, server, layout, cohort)
        stacked = self._decided[1]
        return None if stacked is None or stacked.given_up else stacked

    def _decide(
        self, trainer: pl.Trainer, server: FederatedServer, layout: Layout, cohort: Sequence[ClientId]
    ) -> StackedLocal | None:
        if self.asked == "sequential":
            return None
        reason = not_worth_it(trainer, layout.numel, len(cohort)) if self.asked == "auto" else None
        reason = reason or impossible(trainer, server, layout.dtype)
        if reason is None:
            stacked = StackedLocal(trainer, layout, self._pays(trainer, server, layout, len(cohort)))
            try:
                try_out(stacked, server, cohort)
            except UnfitError as error:
                reason = str(error)
            else:
                rank_zero_info(f"Clients are trained side by side{', compiled' if stacked.graphs.compile else ''}.")
                return stacked
        if self.asked == "vectorized":
            raise ValueError(f'engine="vectorized" is impossible here: {reason}. Use engine="auto".')
        rank_zero_info(f"Clients are trained one by one: {reason}.")
        return None

    def layers(
        self, trainer: pl.Trainer, server: FederatedServer, layout: Layout, cohort: Sequence[ClientId]
    ) -> list[nn.Linear]:
        """The layers whose weights' gradients need not be formed."""
        if self._layers is None or self._layers[0] != layout:
            self._layers = layout, layers_without_gradients(trainer, server, layout, cohort)
        return self._layers[1]

    def _pays(self, trainer: pl.Trainer, server: FederatedServer, layout: Layout, cohort: int) -> bool:
        """Whether compiling should save more than it takes, by the run's size: a clock would make equal runs differ."""
        if self.compile != "auto":
            return self.compile
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        steps = max(trainer.max_epochs or 0, 0) * (server.local_steps or server.local_epochs or 1)
        by_step = 0.4e-3 * -(-cohort // STACK) + 0.3e-9 * cohort * int(data.batch_size) * layout.numel
        return steps * by_step > COMPILE_SECONDS
