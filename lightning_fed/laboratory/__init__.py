"""Federations in closed form, without Lightning: quadratics, finite sums, ``simulate``."""

from lightning_fed.laboratory.quadratic import Exact, FiniteSum, GradientDescent, Loss, Quadratic, Solver
from lightning_fed.laboratory.simulate import History, simulate

__all__ = ["Exact", "FiniteSum", "GradientDescent", "History", "Loss", "Quadratic", "Solver", "simulate"]
