"""Small models, data and trainers for tests. The models know nothing of federations."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer, Quadratic
from lightning_fed.algorithms import Algorithm, FedADMM
from lightning_fed.callbacks import FederatedCallback


def quiet_trainer(server: FederatedServer | Algorithm | None = None, rounds: int = 2, **kwargs: Any) -> pl.Trainer:
    """A stock trainer without bars, logs and checkpoints unless asked for."""
    if isinstance(server, Algorithm):
        server = FederatedServer(server)
    callbacks = [*([server] if server else []), *kwargs.pop("callbacks", [])]
    defaults: dict[str, Any] = {
        "max_epochs": rounds,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=callbacks, **{**defaults, **kwargs})


def classification(clients: int = 4, d: int = 6, classes: int = 3, seed: int = 0, **kwargs: Any) -> FederatedDataModule:
    """Unlike clients of 9, 10, 11, ... samples; a few held out for testing."""
    g = torch.Generator().manual_seed(seed)
    train, test = {}, {}
    for i in range(clients):
        n = 9 + i
        x = torch.randn(n + 4, d, generator=g) + i / clients
        y = (x @ torch.randn(d, classes, generator=g)).argmax(1)
        train[f"c{i}"] = TensorDataset(x[:n], y[:n])
        test[f"c{i}"] = TensorDataset(x[n:], y[n:])
    return FederatedDataModule(train, test=test, **{"batch_size": 4, **kwargs})


class Net(pl.LightningModule):
    """A classifier with whatever is asked for: dropout, BatchNorm, any optimiser, a scheduler."""

    def __init__(
        self,
        optimizer: str = "sgd",
        dropout: float = 0.0,
        norm: bool = False,
        scheduler: str | None = None,
        lr: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(6, 8),
                nn.BatchNorm1d(8) if norm else nn.Identity(),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(8, 3),
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _loss(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log(f"{stage}_loss", loss, batch_size=len(y))
        self.log(f"{stage}_acc", (logits.argmax(1) == y).float().mean(), batch_size=len(y))
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        lr, params = self.hparams["lr"], self.parameters()
        optimizer = {
            "sgd": lambda: torch.optim.SGD(params, lr=lr),
            "momentum": lambda: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-3),
            "adam": lambda: torch.optim.Adam(params, lr=lr),
            "adagrad": lambda: torch.optim.Adagrad(params, lr=lr),
        }[self.hparams["optimizer"]]()
        kind = self.hparams["scheduler"]
        if kind is None:
            return optimizer
        if kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": kind}}


class LeastSquares(pl.LightningModule):
    """f_i(w) = |X_i w - y_i|^2 / (2 N_i), by full gradient steps; in closed form a `Quadratic`."""

    def __init__(self, d: int, lr: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, d, dtype=torch.float64))
        self.lr = lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return 0.5 * (x @ self.w - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def least_squares(n: int = 5, d: int = 4, seed: int = 0) -> tuple[FederatedDataModule, list[Quadratic]]:
    """The same federation twice: as data, and in closed form. Client i holds 6 + i samples, one batch each."""
    g = torch.Generator().manual_seed(seed)
    datasets, quadratics = [], []
    for i in range(n):
        x = torch.randn(6 + i, d, generator=g, dtype=torch.float64)
        y = torch.randn(6 + i, generator=g, dtype=torch.float64)
        datasets.append(TensorDataset(x, y))
        quadratics.append(Quadratic(x.T @ x / len(x), x.T @ y / len(x), num_examples=len(x)))
    return FederatedDataModule(datasets, batch_size=100), quadratics


def x_of(module: nn.Module) -> Tensor:
    """The module's trainable parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])


def fitted(module: pl.LightningModule, data: FederatedDataModule | None = None, **kwargs: Any) -> pl.LightningModule:
    """The module after a short federated fit."""
    server = kwargs.pop("server", None) or FederatedServer(FedADMM(eta=1.0), clients_per_round=2, local_steps=3)
    quiet_trainer(server, **kwargs).fit(module, datamodule=data or classification())
    return module


class Witness(FederatedCallback):
    """Writes down what a federation does: models after every round, local models, cohorts."""

    def __init__(self) -> None:
        self.x0 = torch.empty(0)
        self.x_bar: list[Tensor] = []
        self.x_i: list[dict[Any, Tensor]] = []  # by round: the last local model of everybody who has taken part
        self.cohorts: list[list[Any]] = []
        self._x_i: dict[Any, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.x0 = x_of(pl_module)

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        self._x_i[visit.client] = x_of(module)

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.x_bar.append(x_of(module))
        self.x_i.append(dict(self._x_i))
        self.cohorts.append(report.cohort)


def measured(module: nn.Module, x: Tensor, dataset: TensorDataset) -> tuple[float, float]:
    """Cross entropy and accuracy of a classifier with parameters ``x`` on a whole dataset, in evaluation mode."""
    nn.utils.vector_to_parameters(x, module.parameters())
    inputs, labels = dataset.tensors
    with torch.no_grad():
        logits = module.eval()(inputs)
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())
