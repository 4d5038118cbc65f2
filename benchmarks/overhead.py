"""Cost of a local batch through ``Trainer.fit`` against a bare torch loop that does the same steps.

Both run in this process, one thread, in turns; the figure is the ratio. Usage: python benchmarks/overhead.py
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.datamodules import Synthetic
from lightning_fed.models import MLP

CLIENTS, STEPS, REPEATS = 10, 300, 5


class Silent(MLP):
    """The same model without metrics and ``self.log``, so that both sides do the same work."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def through_lightning(module: pl.LightningModule, data: Synthetic) -> float:
    """Seconds of one round."""
    server = FederatedServer(FedADMM(), clients_per_round=CLIENTS, local_steps=STEPS, evaluate_every=0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[server], accelerator="cpu", enable_progress_bar=False, limit_val_batches=0, **quiet
    )
    trainer.fit(module, datamodule=data)
    return server.report.metrics["seconds"]


def bare(data: Synthetic) -> float:
    """Seconds of the same steps, with the penalty added to the gradient as we do."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    params = list(model.parameters())
    constants = [torch.zeros_like(p) for p in params]
    began = time.monotonic()
    for cid in data.client_ids[:CLIENTS]:
        done = 0
        while done < STEPS:
            for x, y in data.client_dataloader(cid, torch.Generator().manual_seed(done)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                with torch.no_grad():
                    grads = [p.grad for p in params]
                    torch._foreach_add_(grads, params, alpha=1.0)
                    torch._foreach_add_(grads, constants)
                optimizer.step()
                done += 1
                if done == STEPS:
                    break
    return time.monotonic() - began


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    data = Synthetic()
    data.setup("fit")
    rows: dict[str, list[float]] = {"bare torch loop": [], "Trainer.fit": [], "Trainer.fit with self.log, metrics": []}
    for _ in range(REPEATS):
        rows["bare torch loop"].append(bare(data))
        rows["Trainer.fit"].append(through_lightning(Silent(), data))
        rows["Trainer.fit with self.log, metrics"].append(through_lightning(MLP(), data))
    floor = statistics.median(rows["bare torch loop"])
    print(f"torch {torch.__version__}, pytorch-lightning {pl.__version__}, median of {REPEATS}, one thread")
    for name, seconds in rows.items():
        median = statistics.median(seconds)
        print(f"{name:36s} {median / CLIENTS / STEPS * 1e3:6.3f} ms per batch   {median / floor:5.2f}x")


if __name__ == "__main__":
    main()
