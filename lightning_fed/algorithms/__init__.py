"""Federated algorithms: one paper, one file. They import `arguments`, `core`, `prox` and torch."""

from lightning_fed.algorithms.fedadmm import FedADMM
from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.feddr import FedDR
from lightning_fed.algorithms.fedprox import FedProx
from lightning_fed.core import Algorithm

__all__ = ["Algorithm", "FedADMM", "FedAvg", "FedDR", "FedProx"]
