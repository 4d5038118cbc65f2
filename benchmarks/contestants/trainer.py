"""FedADMM with a new Trainer for every visit, which is what Lightning offers without us."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from workloads import Workload

from contestants.ours import model


class Penalty(pl.Callback):
    """Adds the gradient of the augmented Lagrangian's other terms."""

    def __init__(self, eta: float, constant: list[Tensor]) -> None:
        self.eta, self.constant = eta, constant

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        params = list(pl_module.parameters())
        gradients = [p.grad for p in params]
        torch._foreach_add_(gradients, params, alpha=self.eta)
        torch._foreach_add_(gradients, self.constant)


def run(workload: Workload, turn: Callable[[], None], threads: int) -> None:
    torch.set_num_threads(threads)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    data = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in workload.data()]
    module = model(workload)
    params = list(module.parameters())
    x_bar = [p.detach().clone() for p in params]
    first = [x.clone() for x in x_bar]
    states: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    while True:
        turn()
        change = [torch.zeros_like(x) for x in x_bar]
        for i in torch.randperm(workload.clients)[: workload.cohort].tolist():
            x_i, z_i = states.get(i) or (first, [torch.zeros_like(x) for x in first])
            with torch.no_grad():
                torch._foreach_copy_(params, x_i)
            visit(module, data[i], workload, torch._foreach_sub(z_i, x_bar, alpha=workload.eta))
            new = [p.detach().clone() for p in params]
            z_new = torch._foreach_add(z_i, torch._foreach_sub(new, x_bar), alpha=workload.eta)
            states[i] = new, z_new
            torch._foreach_add_(change, torch._foreach_sub(new, x_i))
            torch._foreach_add_(change, torch._foreach_sub(z_new, z_i), alpha=1 / workload.eta)
        torch._foreach_add_(x_bar, change, alpha=1 / workload.clients)


def visit(module: pl.LightningModule, data: TensorDataset, workload: Workload, constant: list[Tensor]) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_steps=workload.steps,
        max_epochs=-1,
        callbacks=[Penalty(workload.eta, constant)],
        accelerator="cpu",
        enable_progress_bar=False,
        limit_val_batches=0,
        **quiet,
    )
    trainer.fit(module, DataLoader(data, batch_size=workload.batch, shuffle=True))
