"""Federated algorithms: one paper, one file. They import `core`, `prox`, `transforms` and torch alone."""

from lightning_fed.algorithms.compressed import Compressed
from lightning_fed.algorithms.drs import douglas_rachford
from lightning_fed.algorithms.fedadagrad import FedAdagrad
from lightning_fed.algorithms.fedadam import FedAdam
from lightning_fed.algorithms.fedadmm import FedADMM
from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.fedavgm import FedAvgM
from lightning_fed.algorithms.feddr import FedDR
from lightning_fed.algorithms.feddr_ii import FedDRII
from lightning_fed.algorithms.feddualavg import FedDualAvg
from lightning_fed.algorithms.feddyn import FedDyn
from lightning_fed.algorithms.fedlin import FedLin
from lightning_fed.algorithms.fedmid import FedMid
from lightning_fed.algorithms.fednova import FedNova
from lightning_fed.algorithms.fedpaq import FedPAQ
from lightning_fed.algorithms.fedpd import FedPD
from lightning_fed.algorithms.fedprimaldual import FedPrimalDual
from lightning_fed.algorithms.fedprox import FedProx
from lightning_fed.algorithms.fedsplit import FedSplit
from lightning_fed.algorithms.fedyogi import FedYogi
from lightning_fed.algorithms.parallel_drs import ParallelDRS
from lightning_fed.algorithms.scaffold import Scaffold
from lightning_fed.core.algorithm import Algorithm

__all__ = [
    "Algorithm",
    "Compressed",
    "FedADMM",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDR",
    "FedDRII",
    "FedDualAvg",
    "FedDyn",
    "FedLin",
    "FedMid",
    "FedNova",
    "FedPAQ",
    "FedPD",
    "FedPrimalDual",
    "FedProx",
    "FedSplit",
    "FedYogi",
    "ParallelDRS",
    "Scaffold",
    "douglas_rachford",
]
