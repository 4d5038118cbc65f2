"""Regularisers and constraints ``g``: a value and a proximal operator each."""

from lightning_fed.prox.base import Prox
from lightning_fed.prox.box import Box
from lightning_fed.prox.l1 import L1
from lightning_fed.prox.squared_l2 import SquaredL2
from lightning_fed.prox.zero import Zero

__all__ = ["L1", "Box", "Prox", "SquaredL2", "Zero"]
