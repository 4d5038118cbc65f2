"""The theorems in numbers: residuals, constants and bounds, tolerances of local work, advice on a penalty."""

from lightning_fed.theory.bounds import (
    Bounds,
    ExactBounds,
    async_step_limit,
    distance_to_solution,
    eta_min,
    exact_eta_min,
    residual_for,
    summable_error2,
)
from lightning_fed.theory.residuals import dual_residual, gradient_mapping, primal_residual
from lightning_fed.theory.tolerance import Absolute, Relative, Summable, Tolerance

__all__ = [
    "Absolute",
    "Bounds",
    "ExactBounds",
    "Relative",
    "Summable",
    "Tolerance",
    "async_step_limit",
    "distance_to_solution",
    "dual_residual",
    "eta_min",
    "exact_eta_min",
    "gradient_mapping",
    "primal_residual",
    "residual_for",
    "summable_error2",
]
