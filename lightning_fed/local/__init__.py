"""Answering the question: exact quadratics (here), any LightningModule (`lightning_fed.local.module`)."""

from lightning_fed.local.quadratic import Exact, FiniteSum, GradientDescent, Quadratic
from lightning_fed.local.tolerance import Absolute, Relative, Summable, Tolerance

__all__ = ["Absolute", "Exact", "FiniteSum", "GradientDescent", "Quadratic", "Relative", "Summable", "Tolerance"]
