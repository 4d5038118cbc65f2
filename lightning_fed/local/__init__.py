"""Answering the question: exact quadratics (here), any LightningModule (`lightning_fed.local.module`)."""

from lightning_fed.local.quadratic import Exact, FiniteSum, GradientDescent, Quadratic

__all__ = ["Exact", "FiniteSum", "GradientDescent", "Quadratic"]
