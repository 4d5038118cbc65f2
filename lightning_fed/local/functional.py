"""A LightningModule's ``training_step`` as a pure function of its parameters, for ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torchmetrics import Metric, MetricCollection

from lightning_fed._compat import is_param_in_hook_signature
from lightning_fed.local.stack import Stack

_LOG = signature(pl.LightningModule.log)


class UnfitError(Exception):
    """Why a module's clients cannot be stacked."""


@dataclass(frozen=True)
class Outline:
    """What a training step logs: numbers and metrics as they are, tensors as None.

    Its outputs are one tensor per name in ``computed``, then the arguments of each metric's update.
    """

    logged: dict[str, tuple[Any, dict[str, Any]]]
    computed: list[str]
    updates: list[tuple[Metric, int]]


@dataclass
class Notes:
    """What a training step logs and which metrics it updates, with the values it gives them."""

    logged: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    batch_sizes: dict[str, int | None] = field(default_factory=dict)
    updates: list[tuple[Metric, tuple[Tensor, ...]]] = field(default_factory=list)

    def log(self, *args: Any, **given: Any) -> None:
        kwargs = _LOG.bind(None, *args, **given).arguments
        name, value = kwargs.pop("name"), kwargs.pop("value")
        del kwargs["self"]
        self.batch_sizes[name] = kwargs.pop("batch_size", None)
        if kwargs.get("reduce_fx", "mean") not in ("mean", None) or name in self.logged:
            raise UnfitError(f"training_step logs {name!r} in a way that is not a mean over batches")
        self.logged[name] = value, kwargs

    def outline(self) -> Outline:
        """What is logged, without the tensors of the step."""
        known = {name: (None if isinstance(value, Tensor) else value) for name, (value, _) in self.logged.items()}
        return Outline(
            {name: (known[name], kwargs) for name, (_, kwargs) in self.logged.items()},
            [name for name in known if known[name] is None],
            [(metric, len(args)) for metric, args in self.updates],
        )

    @contextmanager
    def taken(self, module: nn.Module) -> Iterator[None]:
        """In place of the module's ``log`` and its metrics' ``update``, whose values are tensors of a transform."""
        replaced = []
        for part in module.modules():
            stand_ins: dict[str, Callable[..., Any]] = {}
            if isinstance(part, pl.LightningModule):
                stand_ins = {"log": self.log}
            elif isinstance(part, Metric):
                stand_ins = {"update": self._updating(part), "forward": _value_wanted, "compute": _value_wanted}
            elif isinstance(part, MetricCollection):
                stand_ins = dict.fromkeys(("update", "forward", "compute"), _value_wanted)
            replaced += [(part, name, vars(part).get(name)) for name in stand_ins]
            vars(part).update(stand_ins)
        try:
            yield
        finally:
            for part, name, before in replaced:
                if before is None:
                    del vars(part)[name]
                else:
                    vars(part)[name] = before

    def _updating(self, metric: Metric) -> Callable[..., None]:
        def update(*args: Any, **kwargs: Any) -> None:
            if kwargs or not all(isinstance(arg, Tensor) for arg in args):
                raise UnfitError("training_step updates a metric with something other than tensors")
            self.updates.append((metric, args))

        return update


def _value_wanted(*_: Any, **__: Any) -> NoReturn:
    raise UnfitError("training_step asks a metric for its value; use metric.update(...) and log the metric")


class _Index:
    """Stands for ``batch_idx``, which is not the same for stacked clients: nobody may look at it."""

    def _used(self, *_: Any) -> NoReturn:
        raise UnfitError("training_step uses batch_idx")

    __str__ = __format__ = __bool__ = __index__ = __int__ = __float__ = __hash__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _used


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether they are the same up to rounding; what is not finite is bad data: training will name the client."""
    if not bool(torch.isfinite(theirs).all()):
        return True
    tolerance = max(float(theirs.abs().max()), 1e-30) * float(torch.finfo(theirs.dtype).eps) ** 0.6
    return torch.allclose(ours.to(theirs.dtype), theirs, rtol=0, atol=tolerance)


class Step(nn.Module):
    """A step in the place where ``functional_call`` looks for a module's function; ``batch_idx`` is kept from it.

    Args:
        context: in which it runs, such as that of the trainer's precision.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        name: str = "training_step",
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.module, self.name, self.context = module, name, context
        self.wants_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)

    def forward(self, batch: Any) -> Any:
        with self.context():
            return getattr(self.module, self.name)(*((batch, _Index()) if self.wants_index else (batch,)))


class StackedLoss:
    """Losses and gradients of m clients at once, each at its own parameters and on its own batch.

    A batch's loss is taken as the weighted sum of its samples' losses, so that batches of different sizes fit into one
    stack: missing samples weigh nothing. Whether that is what the module means is tried out before the first round.

    Args:
        names: of the parameters that are stacked; everything else in the module is shared.
        context: in which a training step runs.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        names: Sequence[str],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.module, self.names = module, list(names)
        self.outline = Outline({}, [], [])
        self.step = Step(module, context=context)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._shared_names = [name for name in tensors if name not in self.names]

    def shared(self) -> list[Tensor]:
        """Frozen parameters and buffers, which all clients have in common."""
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return [tensors[name].detach() for name in self._shared_names]

    def alone(self, params: Sequence[Tensor], batch: list[Tensor]) -> Tensor:
        """The loss of one client's batch, as the module computes it; nothing is noted."""
        return self._quietly(params, lambda tensors: self._loss(tensors, batch)[0])

    def is_mean(self, params: Sequence[Tensor], batch: list[Tensor]) -> bool:
        """Whether the loss of a batch is the mean over its samples here; one that is not finite says nothing."""

        def mean(tensors: Mapping[str, Tensor]) -> Tensor:
            def own(*sample: Tensor) -> Tensor:
                loss: Tensor = self._loss(tensors, [part.unsqueeze(0) for part in sample])[0]
                return loss

            return vmap(own)(*batch).mean()

        return close(self._quietly(params, mean), self.alone(params, batch))

    def _quietly(self, params: Sequence[Tensor], function: Callable[[Mapping[str, Tensor]], Tensor]) -> Tensor:
        outline = self.outline
        try:
            tensors = zip([*self.names, *self._shared_names], [*params, *self.shared()], strict=True)
            return function(dict(tensors)).detach()
        finally:
            self.outline = outline

    def __call__(
        self, params: Stack, shared: list[Tensor], batch: list[Tensor], weights: Tensor
    ) -> tuple[Stack, Tensor, list[Tensor]]:
        """Gradients, losses (m,), and what is logged, by sample (m, B, ...), in the order of the outline."""
        one_client = grad_and_value(self._batch_loss, has_aux=True)
        gradients, (losses, noted) = vmap(one_client, in_dims=(0, None, 0, 0))(params, shared, batch, weights)
        return gradients, losses, noted

    def _batch_loss(self, params: Stack, shared: list[Tensor], batch: list[Tensor], weights: Tensor) -> Any:
        tensors = dict(zip([*self.names, *self._shared_names], [*params, *shared], strict=True))

        def sample_loss(*sample: Tensor) -> Any:
            return self._loss(tensors, [part.unsqueeze(0) for part in sample])

        losses, noted = vmap(sample_loss)(*batch)
        return (losses * weights).sum(), noted

    def _loss(self, tensors: Mapping[str, Tensor], batch: list[Tensor]) -> Any:
        notes = Notes()
        with notes.taken(self.module):
            output = functional_call(self.step, {f"module.{name}": t for name, t in tensors.items()}, (batch,))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise UnfitError("training_step returns no loss")
        self.outline = notes.outline()
        values = [notes.logged[name][0].reshape(()) for name in self.outline.computed]
        return loss.reshape(()), [*values, *(arg for _, args in notes.updates for arg in args)]
