"""The theorems in numbers: residuals, constants and bounds, stability, tolerances of local work, advice."""

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
from lightning_fed.theory.stability import Stability, client_limits, equal_weights_limit, g_star, stability_of
from lightning_fed.theory.tolerance import Absolute, Relative, Summable, Tolerance

__all__ = [
    "Absolute",
    "Bounds",
    "ExactBounds",
    "Relative",
    "Stability",
    "Summable",
    "Tolerance",
    "async_step_limit",
    "client_limits",
    "distance_to_solution",
    "dual_residual",
    "equal_weights_limit",
    "eta_min",
    "exact_eta_min",
    "g_star",
    "gradient_mapping",
    "primal_residual",
    "residual_for",
    "stability_of",
    "summable_error2",
]
