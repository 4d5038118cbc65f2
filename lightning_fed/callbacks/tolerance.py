from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from lightning_fed.evaluation.evaluate import check_differentiable
from lightning_fed.lightning import pl
from lightning_fed.trainer.hooks import FederatedCallback

if TYPE_CHECKING:
    from lightning_fed.core.messages import Reply
    from lightning_fed.trainer.hooks import RoundReport, Visit


class LocalTolerance(FederatedCallback):
    """Reports how visits ended; ``FederatedServer(local_tolerance=...)`` adds it.

    Logs ``federated/steps_by_client`` (mean over the cohort), ``federated/local_residual`` (the largest norm of a local
    problem's gradient at the end of a visit) and ``federated/unreached`` (clients that ran out of steps before the
    tolerance held), and warns of the first such client.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedADMM
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))}, batch_size=2)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> server = FederatedServer(FedADMM(eta=1.0), local_epochs=50, local_tolerance=0.1)
    >>> trainer = pl.Trainer(max_epochs=2, callbacks=[server], **quiet)
    >>> trainer.fit(MLP((2, 2), lr=0.5), datamodule=data)
    >>> metrics = trainer.callback_metrics
    >>> float(metrics["federated/unreached"]), bool(metrics["federated/local_residual"] <= 0.1)
    (0.0, True)
    """

    reads_module = False

    def __init__(self) -> None:
        self._visits: dict[Any, tuple[int, float, float]] = {}
        self._warned = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_differentiable(pl_module, "omit local_tolerance")

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        self._visits = {}

    def on_client_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit, reply: Reply[Any, Any]
    ) -> None:
        if (certificate := visit.certificate) is None:
            return
        self._visits[visit.client] = (reply.steps, certificate.residual, certificate.limit)
        if not certificate.holds and not self._warned:
            self._warned = True
            warnings.warn(
                f"Round {visit.round}, client {visit.client!r}: after {reply.steps} local steps, all that are allowed,"
                f" the local gradient is {certificate.residual:.3g}, above the tolerance of {certificate.limit:.3g}."
                " Allow more local_steps or local_epochs, or a looser local_tolerance. This warning is given"
                " once; federated/unreached counts such clients.",
                stacklevel=2,
            )

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        if not self._visits:
            return
        steps, residuals, _ = zip(*self._visits.values(), strict=True)
        unreached = sum(residual > limit for _, residual, limit in self._visits.values())
        self.log_round(
            {
                "federated/steps_by_client": sum(steps) / len(steps),
                "federated/local_residual": max(residuals),
                "federated/unreached": float(unreached),
            }
        )
