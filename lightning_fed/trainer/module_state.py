"""Record, compare and restore the state of a module: parameters, buffers, modes, plain attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_fed.core.layout import buffers_of, clones, overwrite, parameters_of, restore_buffers
from lightning_fed.lightning import NOTES, LightningOptimizer, Logger, Strategy, pl
from lightning_fed.lightning.package import ROOTS
from lightning_fed.trainer.memento import Memento, NotCopyableError
from lightning_fed.trainer.notes import STREAMS, Entries, Items, Names, Note, same_numbers

#: Names under which ``nn.Module`` keeps parameters, buffers, parts and hooks, and Lightning its own notes.
BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}

#: Objects that a module may refer to, but that are not part of its state.
OUTSIDE = (pl.Trainer, pl.Callback, pl.LightningDataModule, DataLoader, Logger, LightningOptimizer, Strategy)
#: Names under which ``nn.Module`` keeps hooks, whose closures may hold state.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes of classes that objects of the class share and may change.
CONTAINERS = (list, dict, set, deque, Tensor, np.ndarray)
#: Packages whose classes hold no state of a user's module.
LIBRARIES = ("torch", "torchvision", "torchmetrics", *ROOTS)


def is_metric(part: Any) -> bool:
    """Whether torchmetrics manages the states of an object by itself."""
    return isinstance(part, Metric) or type(part).__module__.partition(".")[0] == "torchmetrics"


def is_setting(key: str) -> bool:
    """Whether an attribute of a module is neither ``nn.Module``'s nor Lightning's own."""
    return key not in BOOKKEEPING and key not in NOTES


@dataclass(frozen=True, eq=False)
class Changes:
    """Changes of plain attributes: entries appended to lists, by the list's place, and names of all other changes.

    ``streams`` are those of the names that hold random generators.
    """

    appended: Mapping[int, list[Any]]
    names: list[str]
    streams: frozenset[str] = frozenset()


class Attributes:
    """The plain attributes of a module and its parts, as they are now.

    Args:
        module: the module.
        outside: objects that are restored elsewhere, such as the trainer's optimisers.
        metrics: whether to include metrics; otherwise they continue to accumulate.

    ``not_copied`` has the names of attributes that could not be recorded, each with the reason; ``loose_metrics``
    are metrics that the module refers to, but that are not submodules of it.
    """

    def __init__(self, module: nn.Module, outside: Iterable[Any] = (), metrics: bool = False) -> None:
        kept = [*outside, *module.modules(), *module.parameters(), *module.buffers()]
        self._known = {id(value): value for value in kept}  # keeps objects alive, because ids of dead ones are reused
        self._metrics = metrics
        self.loose_metrics: list[Any] = []
        self._memento = Memento(self._is_outside)
        self._parts: list[tuple[str, Items]] = []
        self._structure: list[tuple[str, Items | Names]] = []
        self._notes: dict[str, list[Note]] = {}
        self.not_copied: dict[str, str] = {}
        skipped = [] if metrics else [f"{name}." for name, part in module.named_modules() if is_metric(part)]
        for name, part in module.named_modules():
            if not any(f"{name}.".startswith(prefix) for prefix in skipped):
                self._add(f"{name}." if name else "", part)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self._note_quietly(Items(tensor, vars(tensor)))
            self._add_values(f"{name}.", vars(tensor))

    def note_optimizer(self, optimizer: Any) -> None:
        """Note what an optimiser keeps in attributes besides its state and settings, such as slow weights."""
        keeps = partial(_is_own_of_optimizer)
        self._note_quietly(Items(optimizer, vars(optimizer), keeps))
        for key, value in vars(optimizer).items():
            if keeps(key):
                with suppress(NotCopyableError):  # not an attribute of the module, so no warning either
                    self._memento.add(value)

    def _note_quietly(self, note: Note) -> None:
        """Note content that is restored without a warning."""
        self._memento.notes.append(note)

    def _is_outside(self, value: Any) -> bool:
        if id(value) in self._known or isinstance(value, OUTSIDE):
            return True
        if self._metrics or not is_metric(value):
            return False
        self.loose_metrics.append(value)
        return True

    def _add(self, prefix: str, part: nn.Module) -> None:
        own = vars(part)
        lost = self._add_values(prefix, {key: value for key, value in own.items() if is_setting(key)})
        self._parts.append((prefix, Items(part, own, partial(_is_kept, lost))))
        for key in ("_modules", "_parameters"):
            self._structure.append((prefix, Items(part, own[key])))
        self._structure.append((prefix, Names(part, own["_buffers"])))
        for key in HOOKS:
            self._note_quietly(Items(part, own[key]))
            for hook in own[key].values():
                with suppress(NotCopyableError):  # hooks of a tracker, for example, do not change training
                    self._memento.add(hook)
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] not in LIBRARIES:
                shared = {key: value for key, value in vars(kind).items() if isinstance(value, CONTAINERS)}
                self._add_values(prefix, {key: value for key, value in shared.items() if not key.startswith("__")})

    def _add_values(self, prefix: str, values: Mapping[str, Any]) -> set[str]:
        """Note the content of attributes; return the names of those that cannot be copied."""
        lost = set()
        for key, value in values.items():
            try:
                self._notes.setdefault(prefix + key, []).extend(self._memento.add(value))
            except NotCopyableError as error:
                self.not_copied[prefix + key] = str(error)
                lost.add(key)
        return lost

    def restore(self) -> None:
        """Restore all attributes."""
        for _, note in [*self._structure, *self._parts]:
            if note.changed():
                note.restore()
        self._memento.restore()

    def changes(self) -> Changes:
        """List the changes since the attributes were recorded."""
        appended, names = {}, dict[str, None]()
        for prefix, structure in self._structure:
            names |= {f"{prefix}{key}": None for key in structure.changed_keys()}
        for prefix, items in self._parts:
            quiet = {"training", *_computed(items.owner)}
            names |= {prefix + key: None for key in _told(items) if key not in quiet}
        places = {id(note): i for i, note in enumerate(self._memento.notes)}
        for name, notes in self._notes.items():
            for note in notes:
                if isinstance(note, Entries) and (tail := note.appended()):
                    appended[places[id(note)]] = tail
                elif _told(note) if isinstance(note, Items) else note.changed():
                    names[name] = None
        streams = {name for name in names if any(isinstance(note.owner, STREAMS) for note in self._notes.get(name, ()))}
        return Changes(appended, list(names), frozenset(streams))

    def first_change(self) -> str | None:
        """Name of an attribute that has changed, modes and caches included; None if none has."""
        for prefix, items in [*self._structure, *self._parts]:
            for key in items.changed_keys():
                return f"{prefix}{key}"
        return next((name for name, notes in self._notes.items() if any(note.changed() for note in notes)), None)

    def append(self, appended: Mapping[int, list[Any]]) -> None:
        """Append entries to the lists at these places."""
        for place, entries in appended.items():
            self._memento.notes[place].owner.extend(entries)


def _is_own_of_optimizer(key: str) -> bool:
    return key not in ("state", "param_groups", "defaults", "step", "_opt_called")


def _is_kept(lost: set[str], key: str) -> bool:
    return is_setting(key) and key not in lost


def _told(items: Items) -> list[str]:
    """Keys of changed attributes, except cached properties."""
    kind = type(items.owner)
    return [key for key in items.changed_keys() if not isinstance(getattr(kind, str(key), None), cached_property)]


def _computed(part: nn.Module) -> set[str]:
    """Attributes that hooks of ``torch.nn.utils`` compute from parameters: weights that are pruned or normalised."""
    hooks = [hook for hook in part._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils")]
    return {getattr(hook, "_tensor_name", getattr(hook, "name", "")) for hook in hooks}


class ModuleState:
    """Parameters, which of them are trained, buffers, modes and plain attributes of a module, as they are now.

    Args:
        outside, metrics: as of :class:`Attributes`.
        copies: earlier copies of frozen parameters, reused if still equal, so that a large frozen model is copied once
            in a run, not once in a round.
    """

    def __init__(
        self,
        module: nn.Module,
        outside: Iterable[Any] = (),
        metrics: bool = False,
        copies: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.module = module
        self._requires_grad = {name: p.requires_grad for name, p in module.named_parameters()}
        self.parameters = {
            name: _copy(value, None if self._requires_grad[name] else (copies or {}).get(name))
            for name, value in parameters_of(module).items()
        }
        self.buffers = clones(buffers_of(module))
        self.attributes = Attributes(module, outside, metrics)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Copies of the frozen parameters."""
        return {name: value for name, value in self.parameters.items() if not self._requires_grad[name]}

    def restore(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Restore everything; ``state`` replaces buffers and parameters of the same name."""
        self.attributes.restore()
        for name, p in self.module.named_parameters():
            if p.requires_grad != self._requires_grad[name]:
                p.requires_grad_(self._requires_grad[name])
        restore_state(self.module, {**self.parameters, **self.buffers, **(state or {})})

    def moved(self, personal: Container[str] = ()) -> dict[str, Tensor]:
        """Copies of buffers, of ``personal`` parameters, and of frozen parameters whose values have changed."""
        now = parameters_of(self.module)
        own = {name: value for name, value in now.items() if name in personal}
        frozen = (name for name, trained in self._requires_grad.items() if not trained)
        moved = {
            name: now[name] for name in frozen if name in now and not same_numbers(now[name], self.parameters[name])
        }
        return clones({**buffers_of(self.module), **moved, **own})


def _copy(value: Tensor, made_before: Tensor | None) -> Tensor:
    """Copy a parameter; return the earlier copy if the parameter has not changed since."""
    if made_before is not None and made_before.dtype == value.dtype and same_numbers(made_before, value):
        return made_before
    return value.detach().clone()


def restore_state(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the module's buffers to ``values``, and also the parameters that ``values`` names."""
    parameters = parameters_of(module)
    overwrite(parameters, {name: value for name, value in values.items() if name in parameters})
    restore_buffers(module, values)


def state_dict_with(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """The module's state dict, with copies of ``values`` for the parameters and buffers that they name."""
    now = module.state_dict(keep_vars=True)
    names = {id(p): name for name, p in module.named_parameters()}  # aliases share an id
    mine = {key: values.get(names.get(id(value), key)) for key, value in now.items()}
    return {key: now[key] if value is None else value.to(now[key].dtype, copy=True) for key, value in mine.items()}


def is_renormed(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of an embedding that renormalises the rows it looks up."""
    owner, _, key = name.rpartition(".")
    return key == "weight" and getattr(module.get_submodule(owner), "max_norm", None) is not None


def attribute_reaching(module: nn.Module, other: nn.Module) -> str | None:
    """Name of an attribute through which ``module`` refers to another module, its parts, parameters or buffers.

    A copy of a module may do so: functions are not copied, and a lambda that uses ``self`` refers to the original.
    """
    targets = {id(value): value for value in [*other.modules(), *other.parameters(), *other.buffers()]}
    own = {id(value) for value in [*module.modules(), *module.parameters(), *module.buffers()]}
    found: list[Any] = []

    def is_outside(value: Any) -> bool:
        found.extend([value] if id(value) in targets else [])
        return id(value) in targets or id(value) in own or isinstance(value, OUTSIDE)

    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if is_setting(key):
                with suppress(NotCopyableError):
                    Memento(is_outside).add(value)
                if found:
                    return f"{prefix}.{key}".lstrip(".")
    return None
