"""A LightningModule's step as a pure function of its parameters, buffers and batch, for ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torchmetrics import Metric, MetricCollection

from lightning_fed.lightning import is_param_in_hook_signature, pl
from lightning_fed.local.stacked.stack import Stack
from lightning_fed.trainer.module_state import attribute_reaching

_LOG = signature(pl.LightningModule.log)

#: Names of Lightning's reductions of the values that the batches of an epoch log.
REDUCTIONS = ("mean", "sum", "min", "max")


class UnfitError(Exception):
    """Clients cannot be stacked; the message is the reason."""


@dataclass(frozen=True)
class Entry:
    """A call of ``self.log``: its value, unless that is a tensor of the step, and its arguments."""

    known: Any
    reduction: str
    batch_size: int | None
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Outline:
    """The log calls of a step by name, and the metrics that it updates, each with its number of arguments.

    The step's tensors are one for each entry without a known value, then the arguments of each update.
    """

    logged: dict[str, Entry]
    updates: list[tuple[Metric, int]]


@dataclass
class Notes:
    """The log calls and metric updates of a step, with their values.

    ``originals`` are the metrics of the trainer's module, by the ids of their copies.
    """

    originals: Mapping[int, Metric] = field(default_factory=dict)
    logged: dict[str, tuple[Any, Entry]] = field(default_factory=dict)
    updates: list[tuple[Metric, tuple[Tensor, ...]]] = field(default_factory=list)

    def log(self, *args: Any, **given: Any) -> None:
        kwargs = _LOG.bind(None, *args, **given).arguments
        name, value = kwargs.pop("name"), kwargs.pop("value")
        value = self.originals.get(id(value), value)
        del kwargs["self"]
        size, reduction = kwargs.pop("batch_size", None), _reduction(kwargs.get("reduce_fx", "mean"))
        if name in self.logged:
            raise UnfitError(f"{name!r} is logged twice in one step")
        if reduction not in REDUCTIONS or not (size is None or isinstance(size, int)):
            raise UnfitError(f"{name!r} is logged with reduce_fx={reduction!r} and batch_size={size!r}")
        if not isinstance(value, Tensor | Metric | int | float):
            raise UnfitError(f"{name!r} is logged as a {type(value).__name__}, not as a number or a metric")
        self.logged[name] = value, Entry(None if isinstance(value, Tensor) else value, reduction, size, kwargs)

    def outline(self) -> Outline:
        """The notes without the tensors of the step."""
        updates = [(metric, len(args)) for metric, args in self.updates]
        return Outline({name: entry for name, (_, entry) in self.logged.items()}, updates)

    def tensors(self) -> list[Tensor]:
        """The tensors that go with the outline."""
        values = [value.reshape(()) for value, entry in self.logged.values() if entry.known is None]
        return [*values, *(arg for _, args in self.updates for arg in args)]


def _reduction(function: Any) -> str:
    name = function if isinstance(function, str) else getattr(function, "__name__", str(function))
    return "mean" if name.lower() == "avg" else name.lower()


class _Index:
    """Replaces ``batch_idx``, which may differ between stacked clients: a step that uses it is refused."""

    def _used(self, *_: Any) -> NoReturn:
        raise UnfitError("it uses batch_idx")

    __str__ = __format__ = __bool__ = __index__ = __int__ = __float__ = __hash__ = _used
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _used


class _NoTrainer:
    """Replaces the trainer, because a recorded step would freeze the trainer's numbers."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UnfitError(f"it reads the trainer ({name})")


def _value_wanted(*_: Any, **__: Any) -> NoReturn:
    raise UnfitError("it asks a metric for its value; use metric.update(...) and log the metric")


class PureStep(nn.Module):
    """A module's step as a function of tensors and a batch, which returns the loss and notes the log calls.

    It works on a deep copy of the module, so that the step cannot change the trainer's module.

    Args:
        name: name of the step.
        context: context manager around the step, such as that of the trainer's precision.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        name: str = "training_step",
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        try:
            self.twin = copy.deepcopy(module)
        except Exception as error:  # __deepcopy__ of a user's class may raise any error
            raise UnfitError(f"{type(module).__name__} cannot be copied: {error}") from error
        if attribute := attribute_reaching(self.twin, module):
            raise UnfitError(
                f"{type(module).__name__}.{attribute} is a function that refers to the module: use a method"
            )
        self.name, self.context = name, context
        # the same test as in Lightning, which accepts steps without batch_idx
        self.wants_index = is_param_in_hook_signature(getattr(self.twin, name), "batch_idx", min_args=2)
        self.originals: dict[int, Metric] = {}
        self.notes = Notes()
        for path, part in self.twin.named_modules():
            # an attribute in vars() of an instance hides the method of its class
            if isinstance(part, pl.LightningModule):
                vars(part).update(log=lambda *args, **kwargs: self.notes.log(*args, **kwargs), _trainer=_NoTrainer())
            elif isinstance(part, Metric):
                original: Any = module.get_submodule(path)
                self.originals[id(part)] = original
                vars(part).update(update=self._updating(original), forward=_value_wanted, compute=_value_wanted)
            elif isinstance(part, MetricCollection):
                vars(part).update(dict.fromkeys(("update", "forward", "compute"), _value_wanted))

    def _updating(self, metric: Metric) -> Callable[..., None]:
        def update(*args: Any, **kwargs: Any) -> None:
            if kwargs or not all(isinstance(arg, Tensor) for arg in args):
                raise UnfitError("it updates a metric with something other than tensors in their order")
            self.notes.updates.append((metric, args))

        return update

    def forward(self, batch: Any) -> Any:
        """Run the step; ``functional_call`` has replaced parameters and buffers by other tensors."""
        with self.context():
            return getattr(self.twin, self.name)(*((batch, _Index()) if self.wants_index else (batch,)))

    def run(self, tensors: Mapping[str, Tensor], batch: Any) -> tuple[Any, Notes]:
        """Run the step at ``tensors``; return its loss, or None if it returns none, and its notes."""
        self.notes = notes = Notes(self.originals)  # fresh notes, because trials and recordings write notes too
        output = functional_call(self, {f"twin.{name}": t for name, t in tensors.items()}, (batch,))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return (loss if isinstance(loss, Tensor) else None), notes


class StackedLoss:
    """Losses and gradients of m clients at once, each at its own parameters and on its own whole batch.

    Args:
        names: names of the stacked parameters; clients share all other tensors of the module.
        context: context manager around a training step.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        names: Sequence[str],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.module, self.names = module, list(names)
        self.step = PureStep(module, context=context)
        self.outline = Outline({}, [])
        self._shared_names = [name for name in self._tensors() if name not in self.names]

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def shared(self) -> list[Tensor]:
        """Frozen parameters and buffers, which all clients have in common."""
        tensors = self._tensors()
        return [tensors[name].detach() for name in self._shared_names]

    def __call__(self, params: Stack, shared: list[Tensor], batch: list[Tensor]) -> tuple[Stack, Tensor, list[Tensor]]:
        """Gradients, losses (m,), and noted tensors (m, ...) in the order of the outline."""
        one_client = grad_and_value(self.loss, has_aux=True)
        gradients, (losses, noted) = vmap(one_client, in_dims=(0, None, 0))(params, shared, batch)
        return gradients, losses, noted

    def loss(self, params: Sequence[Tensor], shared: Sequence[Tensor], batch: list[Tensor]) -> Any:
        """The loss of one client's batch, as the module computes it, and the noted tensors."""
        tensors = dict(zip([*self.names, *self._shared_names], [*params, *shared], strict=True))
        loss, notes = self.step.run(tensors, batch)
        if loss is None:
            raise UnfitError("it returns no loss")
        self.outline = notes.outline()
        return loss.reshape(()), notes.tensors()

    def alone(
        self, params: Sequence[Tensor], shared: Sequence[Tensor], batch: list[Tensor]
    ) -> tuple[Sequence[Tensor | None], Tensor, list[Tensor]]:
        """The same for one client, without ``torch.func``; None for parameters that have no gradient."""
        with torch.inference_mode(False), torch.enable_grad():
            # clones: tensors made in inference mode cannot be differentiated
            leaves = [p.detach().clone().requires_grad_() for p in params]
            loss, noted = self.loss(leaves, [tensor.clone() for tensor in shared], [part.clone() for part in batch])
            found: Sequence[Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
        return found, loss.detach(), [value.detach() for value in noted]
