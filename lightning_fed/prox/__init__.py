"""Regularisers and constraints ``g``: a value and a proximal operator each."""

from lightning_fed.core.prox import Prox
from lightning_fed.core.selective import Selective
from lightning_fed.core.zero import Zero
from lightning_fed.prox.affine import Affine
from lightning_fed.prox.box import Box
from lightning_fed.prox.elastic_net import ElasticNet
from lightning_fed.prox.group_lasso import GroupLasso
from lightning_fed.prox.intersection import Intersection
from lightning_fed.prox.l1 import L1
from lightning_fed.prox.l1_ball import L1Ball
from lightning_fed.prox.l2 import L2
from lightning_fed.prox.l2_ball import L2Ball
from lightning_fed.prox.linf import LInf
from lightning_fed.prox.non_negative import NonNegative
from lightning_fed.prox.nuclear import Nuclear
from lightning_fed.prox.scaled import Scaled
from lightning_fed.prox.simplex import Simplex
from lightning_fed.prox.squared_l2 import SquaredL2
from lightning_fed.prox.sum import Sum
from lightning_fed.prox.translated import Translated

__all__ = [
    "L1",
    "L2",
    "Affine",
    "Box",
    "ElasticNet",
    "GroupLasso",
    "Intersection",
    "L1Ball",
    "L2Ball",
    "LInf",
    "NonNegative",
    "Nuclear",
    "Prox",
    "Scaled",
    "Selective",
    "Simplex",
    "SquaredL2",
    "Sum",
    "Translated",
    "Zero",
]
