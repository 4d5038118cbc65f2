"""Contracts that a module's class declares about its steps, so that none has to be guessed."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_fed.lightning import pl


def declares(module: pl.LightningModule, contract: str, *steps: str) -> bool:
    """Whether a module's class declares ``contract = True`` for its steps.

    The declaration holds for the class that makes it and for subclasses, as long as they override neither ``forward``
    nor one of the ``steps``, nor a method of the user's that these may call: a subclass that does must declare again.
    """
    kinds = type(module).__mro__
    owner = next((i for i, kind in enumerate(kinds) if contract in vars(kind)), None)
    if owner is None or getattr(module, contract) is not True:
        return False
    known = {name for kind in kinds[owner:] for name in vars(kind)}
    below = [vars(module), *map(vars, kinds[:owner])]
    changed = {name for names in below for name, value in names.items() if callable(value) or type(value) is property}
    return not any(_matters(name, steps) for name in changed & known)


def _matters(name: str, steps: tuple[str, ...]) -> bool:
    """Whether overriding a method may change a step; steps do not call Lightning's other hooks and methods."""
    return name in (*steps, "forward") or not (hasattr(pl.LightningModule, name) or hasattr(nn.Module, name))


def undeclared(module: Any) -> str:
    """Advice for a user whose module could perhaps be stacked."""
    return (
        f"{type(module).__name__} does not declare that it can be stacked. If its training_step depends on nothing but"
        ' batch, parameters and buffers, set stackable = True in its class, or engine="vectorized" (docs/speed.md)'
    )
