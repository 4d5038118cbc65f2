"""The trainer's module, optimisers and schedulers as the server left them, lent to one client after another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.vector import buffers_of, clones, overwrite, parameters_of, restore_buffers


class Workspace:
    """A snapshot of everything a visit may change, taken before the first visit of a round.

    All parameters are restored between clients, not only the trainable ones, and all buffers: what one client does
    must not reach the next. Optimisers start every visit without memory, schedulers where the server left them.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.module = trainer.lightning_module
        self.parameters = clones(parameters_of(self.module))
        self.buffers = clones(buffers_of(self.module))
        self._requires_grad = {name: p.requires_grad for name, p in self.module.named_parameters()}
        self._optimizers = [(optimizer, _memory(optimizer), _settings(optimizer)) for optimizer in trainer.optimizers]
        self._schedulers = [
            (config.scheduler, copy.deepcopy(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs
        ]

    def reset(self, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Make everything as it was; ``buffers`` replace those of the same name."""
        for name, p in self.module.named_parameters():
            p.requires_grad_(self._requires_grad[name])
            p.grad = None
        overwrite(parameters_of(self.module), self.parameters)
        restore_buffers(self.module, {**self.buffers, **(buffers or {})})
        for optimizer, memory, settings in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update({p: _copied(state) for p, state in memory.items()})
            for group, saved in zip(optimizer.param_groups, settings, strict=True):
                group.update(_copied(saved))
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))

    def state_dict(self) -> dict[str, Any]:
        """The module's state dict with the server's tensors, for whoever saves while a client is at work."""
        now = self.module.state_dict(keep_vars=True)
        parameters = {id(p): self.parameters[name] for name, p in self.module.named_parameters()}  # aliases share an id
        mine = {key: parameters.get(id(value), self.buffers.get(key)) for key, value in now.items()}
        return {key: now[key] if value is None else value.clone() for key, value in mine.items()}

    def server_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the server's optimisers and schedulers into a checkpoint that is taken while a client is at work."""
        for (optimizer, memory, settings), saved in zip(
            self._optimizers, checkpoint.get("optimizer_states", []), strict=True
        ):
            index = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
            saved["state"] = {index[p]: _copied(state) for p, state in memory.items()}
            for group, kept in zip(saved["param_groups"], settings, strict=True):
                group.update(_copied(kept))
        if "lr_schedulers" in checkpoint:
            checkpoint["lr_schedulers"] = [copy.deepcopy(state) for _, state in self._schedulers]


def _memory(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    return {p: _copied(state) for p, state in optimizer.state.items()}


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [_copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in values.items()}
