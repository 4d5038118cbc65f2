"""Callbacks that people expect of a federation; `FederatedServer` adds them by itself where they are missing."""

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.callbacks.confusion import Confusion
from lightning_fed.callbacks.evaluation import ClientEvaluation
from lightning_fed.callbacks.figure import FinalFigure
from lightning_fed.callbacks.progress import FederatedProgressBar
from lightning_fed.callbacks.sparsity import Sparsity

__all__ = ["ClientEvaluation", "Confusion", "FederatedCallback", "FederatedProgressBar", "FinalFigure", "Sparsity"]
