from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_fed.core.patterns import check_patterns, matching
from lightning_fed.core.selective import Patterns
from lightning_fed.lightning import pl
from lightning_fed.trainer.hooks import FederatedCallback

if TYPE_CHECKING:
    from lightning_fed.trainer.hooks import RoundReport


class Sparsity(FederatedCallback):
    """Logs after every round how much of the server's model is exactly zero, as a ``g`` such as `GroupLasso` makes it.

    ``sparsity/zeros`` is the share of zero parameters; ``sparsity/conv1.weight`` the share in one tensor, and
    ``sparsity/conv1.weight/filters`` the number of its filters (or rows: the entries of one index of the first
    dimension) that are entirely zero.

    Args:
        on: patterns of the trainable parameters that count, as a ``g`` takes them; all by default.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedADMM
    >>> from lightning_fed.models import MLP
    >>> from lightning_fed.prox import L1
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))}, batch_size=2)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> server = FederatedServer(FedADMM(g=L1(100.0)))  # so strong that nothing is left
    >>> trainer = pl.Trainer(max_epochs=2, callbacks=[server, Sparsity()], **quiet)
    >>> trainer.fit(MLP((2, 2), lr=0.01), datamodule=data)
    >>> {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("sparsity/")}
    {'sparsity/zeros': 1.0, 'sparsity/layers.0.weight': 1.0, 'sparsity/layers.0.weight/filters': 2.0, ...}
    """

    def __init__(self, on: Patterns = None) -> None:
        self.on = check_patterns(self, on)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.chosen(pl_module, _personal(trainer))

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        self.log_round(self.measure(module, _personal(trainer)))

    def measure(self, module: nn.Module, personal: Container[str] = ()) -> dict[str, float]:
        """All logged values of a model, without its ``personal`` parameters."""
        chosen = self.chosen(module, personal)
        entries = sum(p.numel() for p in chosen.values())
        found = {"sparsity/zeros": sum(int((p == 0).sum()) for p in chosen.values()) / entries}
        for name, p in chosen.items():
            found[f"sparsity/{name}"] = float((p == 0).double().mean())
            if p.ndim > 1:
                found[f"sparsity/{name}/filters"] = float((p == 0).flatten(1).all(1).sum())
        return found

    def chosen(self, module: nn.Module, personal: Container[str] = ()) -> dict[str, Tensor]:
        """The parameters that count, by name."""
        named = ((name, p) for name, p in module.named_parameters() if name not in personal)
        trainable = {name: p.detach() for name, p in named if p.requires_grad}
        return {name: trainable[name] for name in matching(self, self.on or "*", list(trainable))}


def _personal(trainer: pl.Trainer) -> Container[str]:
    """Names of parameters that clients keep to themselves, to which no ``g`` applies."""
    return getattr(getattr(trainer.fit_loop, "server", None), "personal", ())
