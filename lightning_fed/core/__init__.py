"""The interface between algorithms and everything else, and the state of a running federation. Read first.

No module of this room imports Lightning or touches data: an algorithm is a handful of pure functions of flat vectors.
"""

from lightning_fed.core.algorithm import Algorithm, Start, Weights, hyper_parameters, start_point
from lightning_fed.core.failures import FailurePolicy, Fault, Retry
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local, LocalProblem, Question, Solution, StepMap
from lightning_fed.core.records import num_bytes, record, tree_map, wide
from lightning_fed.core.table import Table
from lightning_fed.core.traits import Traits

__all__ = [
    "Algorithm",
    "Broadcast",
    "FailurePolicy",
    "Fault",
    "Local",
    "LocalProblem",
    "Question",
    "Reply",
    "Retry",
    "Solution",
    "Start",
    "StepMap",
    "Table",
    "Total",
    "Traits",
    "Weights",
    "hyper_parameters",
    "num_bytes",
    "record",
    "start_point",
    "tree_map",
    "wide",
]
