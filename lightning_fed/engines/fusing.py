"""Whether large layers can do without the gradients of their weights: tried out on one batch before the first round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_fed._compat import collect_rng_states
from lightning_fed.fused import Factors, factored, is_possible, large_layers
from lightning_fed.lean import why_not
from lightning_fed.measure import batch_gradient
from lightning_fed.store import ClientId
from lightning_fed.vector import Layout
from lightning_fed.visit import Visit, local_epochs, move_batch

if TYPE_CHECKING:
    from lightning_fed.server import FederatedServer


def layers_without_gradients(
    trainer: pl.Trainer, server: FederatedServer, layout: Layout, cohort: Sequence[ClientId]
) -> list[nn.Linear]:
    """The large linear layers that can do without."""
    module = trainer.lightning_module
    layers = large_layers(module) if why_not(trainer, server) is None and is_possible(trainer) else []
    if not layers:
        return []
    visit, factors = Visit(server.rounds_done, cohort[0], 0, 1), Factors()
    try:
        loader, _ = next(local_epochs(trainer, server, visit))
        batch, noise = move_batch(trainer, next(iter(loader))), collect_rng_states()
        expected = layout.split(batch_gradient(trainer, layout, batch, 0, noise))
        with factored(layers, factors):
            found = layout.split(batch_gradient(trainer, layout, batch, 0, noise))
    except Exception:  # a step that differentiates inside itself, for instance, or data that fail: that is told later
        return []
    names = {part: f"{name}.weight" if name else "weight" for name, part in module.named_modules()}
    for layer, slopes, inputs in factors.found:
        found[names[layer]] = torch.addmm(found[names[layer]], slopes.t(), inputs)
    same = all(torch.allclose(found[name], value, rtol=1e-3, atol=1e-6) for name, value in expected.items())
    return layers if same else []
