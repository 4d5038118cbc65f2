"""Callbacks for a federation; `FederatedServer` adds the usual ones if they are missing."""

from lightning_fed.callbacks.confusion import Confusion
from lightning_fed.callbacks.evaluation import ClientEvaluation
from lightning_fed.callbacks.faults import Faults
from lightning_fed.callbacks.figure import FinalFigure
from lightning_fed.callbacks.optuna_pruning import OptunaPruning
from lightning_fed.callbacks.progress import FederatedProgressBar
from lightning_fed.callbacks.rich_progress import FederatedRichProgressBar
from lightning_fed.callbacks.sparsity import Sparsity
from lightning_fed.callbacks.theory_meter import TheoryMeter
from lightning_fed.callbacks.tolerance import LocalTolerance
from lightning_fed.trainer.hooks import FederatedCallback, RoundReport, Visit

__all__ = [
    "ClientEvaluation",
    "Confusion",
    "Faults",
    "FederatedCallback",
    "FederatedProgressBar",
    "FederatedRichProgressBar",
    "FinalFigure",
    "LocalTolerance",
    "OptunaPruning",
    "RoundReport",
    "Sparsity",
    "TheoryMeter",
    "Visit",
]
