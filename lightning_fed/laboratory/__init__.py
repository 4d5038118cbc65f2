"""Federations in closed form, without Lightning: quadratics, finite sums, ``simulate``."""

from lightning_fed.laboratory.history import History
from lightning_fed.laboratory.protocols import Loss, Solver
from lightning_fed.laboratory.quadratic import Exact, FiniteSum, GradientDescent, Quadratic
from lightning_fed.laboratory.simulate import simulate

__all__ = ["Exact", "FiniteSum", "GradientDescent", "History", "Loss", "Quadratic", "Solver", "simulate"]
