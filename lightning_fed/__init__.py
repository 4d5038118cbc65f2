"""Turn ``Trainer.fit`` into a federation."""

from lightning_fed._version import __version__
from lightning_fed.data import FederatedDataModule
from lightning_fed.local.quadratic import Exact, FiniteSum, GradientDescent, Quadratic
from lightning_fed.server import FederatedServer
from lightning_fed.simulation import simulate

__all__ = [
    "Exact",
    "FederatedDataModule",
    "FederatedServer",
    "FiniteSum",
    "GradientDescent",
    "Quadratic",
    "__version__",
    "simulate",
]
