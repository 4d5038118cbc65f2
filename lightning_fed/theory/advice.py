"""Recommend penalty, relaxation, step size and local steps from measured curvature."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.theory.residuals import contraction, penalty_bound, steps_for

#: Local work is enough if it shrinks the gradient of the local problem to this share.
ENOUGH = 0.1

#: Names of penalties, and of steps, which are inverse penalties, among hyper-parameters.
PENALTIES, STEPS = ("eta", "mu"), ("eta_hat", "s")


@dataclass(frozen=True)
class CurvatureRange:
    """Curvature of the clients' losses at the first model, and after some gradient steps from it.

    Args:
        at_start: largest curvature of any measured client at the first model.
        later: the same after ``steps`` gradient steps.
        steps: number of gradient steps between the two points.
        lowest: lowest curvature of any measured client at either point; NaN if it is unknown.
        method: "hessian" (power iteration) or "differences" (of gradients).
    """

    at_start: float
    later: float
    steps: int
    lowest: float
    method: str

    @property
    def L(self) -> float:  # noqa: N802 - the paper's letter
        """Largest curvature at either point."""
        return max(self.at_start, self.later)

    @property
    def negative(self) -> float:
        """The most negative curvature, or 0; -L if it is not known."""
        return -self.L if math.isnan(self.lowest) else min(self.lowest, 0.0)


@dataclass(frozen=True)
class Advice:
    """One setting: its value ``now``, the ``advised`` value, the ``verdict`` on the former, and the reason."""

    setting: str
    now: float | None
    advised: float | None
    verdict: str
    reason: str


def advise(
    curvature: CurvatureRange, algorithm: Algorithm[Any, Any, Any], lr: float | None, local_steps: int
) -> list[Advice]:
    """Recommendations that fit each other; ``lr`` is None if local steps are not plain gradient steps."""
    penalty = _penalty(curvature, algorithm, local_steps)
    advised = algorithm.traits.penalty if penalty is None else _as_penalty(penalty)
    found = [
        penalty,
        _relaxation(curvature, algorithm),
        _lr(curvature, algorithm.traits.penalty, advised, lr),
        _local_steps(curvature, algorithm.traits.penalty, advised, lr, local_steps),
    ]
    return [advice for advice in found if advice is not None]


def practical_penalty(curvature: CurvatureRange, local_steps: int) -> float:
    r"""The least :math:`\rho` whose local problem ``local_steps`` steps of :math:`1/(L+\rho)` solve to a tenth.

    The slowest direction has curvature :math:`\rho + m`, with m the most negative one of :math:`f_i`:

    .. math:: \Big(1 - \frac{\rho+m}{L+\rho}\Big)^T \le \tfrac1{10} \iff \rho \ge 10^{1/T}(L-m) - L
    """
    return math.pow(ENOUGH, -1 / local_steps) * (curvature.L - curvature.negative) - curvature.L


def _penalty(curvature: CurvatureRange, algorithm: Algorithm[Any, Any, Any], local_steps: int) -> Advice | None:
    rho, alpha, L = algorithm.traits.penalty, algorithm.traits.relaxation, curvature.L
    if alpha is None:
        return None
    bound = penalty_bound(L, min(alpha, 1.0))  # if alpha is too large, alpha should change
    theory, practical = 1.1 * bound, min(practical_penalty(curvature, local_steps), 1.1 * bound)
    reason = (
        f"The theorem needs a penalty above {bound:.4g} = {bound / L:.3g} L, such as {theory:.4g}. The bound is"
        f" cautious: from {practical:.4g} on, {local_steps} local steps solve the local problem to a tenth, even along"
        f" the lowest curvature {'assumed' if math.isnan(curvature.lowest) else 'seen'}, {curvature.negative:.3g}."
    )
    if rho > 10 * bound:
        return _in_its_words(
            algorithm, rho, theory, "too large", f"{reason} Far above the bound, every round makes little progress."
        )
    if rho >= practical * (1 - 1e-9):
        inside = (
            "" if rho > bound else " Below the theorem's bound, nothing is guaranteed for losses that are not convex."
        )
        return _in_its_words(algorithm, rho, rho, "ok", reason + inside)
    return _in_its_words(
        algorithm, rho, practical, "too small", f"{reason} A smaller penalty may work, without a guarantee."
    )


def _in_its_words(algorithm: Algorithm[Any, Any, Any], now: float, advised: float, verdict: str, reason: str) -> Advice:
    """Name the penalty as the algorithm does, which may call its inverse a step."""
    inner: Any = getattr(algorithm, "algorithm", algorithm)
    names = {field.name for field in dataclasses.fields(inner)}
    for name in PENALTIES:
        if name in names:
            return Advice(name, now, advised, verdict, reason)
    for name in STEPS:
        if name in names:
            opposite = {"too small": "too large", "too large": "too small"}.get(verdict, verdict)
            return Advice(name, 1 / now, 1 / advised, opposite, f"It is 1 / penalty. {reason}")
    return Advice("penalty", now, advised, verdict, reason)


def _as_penalty(advice: Advice) -> float:
    assert advice.advised is not None
    return 1 / advice.advised if advice.setting in STEPS else advice.advised


def _relaxation(curvature: CurvatureRange, algorithm: Algorithm[Any, Any, Any]) -> Advice | None:
    alpha, rho = algorithm.traits.relaxation, algorithm.traits.penalty
    if alpha is None:
        return None
    limit = 2 - 2 * curvature.L / rho
    if alpha <= 1:
        reason = "1 is the paper's method, which the theorem covers for inexact local solutions."
        if limit > 1:
            reason += f" With this penalty and near-exact local work it may go up to 2 - 2 L / penalty = {limit:.3g}."
        return Advice("alpha", alpha, alpha, "ok", reason)
    reason = f"Above 1 the theorem needs exact local work and alpha below 2 - 2 L / penalty = {limit:.3g}."
    return Advice("alpha", alpha, alpha if alpha < limit else 1.0, "ok" if alpha < limit else "too large", reason)


def _lr(curvature: CurvatureRange, rho: float, advised_rho: float, lr: float | None) -> Advice:
    L, advised = curvature.L, 1 / (curvature.L + advised_rho)
    reason = f"Gradient steps diverge from 2 / (L + penalty) = {2 / (L + rho):.4g} on; 1 / (L + penalty) is quickest."
    if lr is None:
        return Advice("lr", None, None, "not judged", f"The optimiser is not plain SGD. {reason}")
    stability = lr * (L + rho)
    measured_as = f" Now lr * (L + penalty) = {stability:.3g}."
    if stability >= 2:
        return Advice("lr", lr, advised, "diverges", reason + measured_as)
    if stability < 0.01:
        return Advice("lr", lr, advised, "too small", reason + measured_as)
    room = " This is close to 2, and the measured L is a lower bound." if stability > 1.5 else ""
    return Advice("lr", lr, advised, "ok", reason + measured_as + room)


def _local_steps(
    curvature: CurvatureRange, rho: float, advised_rho: float, lr: float | None, local_steps: int
) -> Advice:
    L, lowest = curvature.L, curvature.negative
    needed = steps_for(ENOUGH, contraction(1 / (L + advised_rho), advised_rho, L, lowest))
    goal = f"{needed} full gradient steps with the values advised shrink the local problem's gradient tenfold"
    if needed == math.inf:
        return Advice(
            "local_steps",
            local_steps,
            None,
            "not judged",
            "No penalty makes the local problem strongly convex, so no number of steps is enough to solve"
            " it; fewer steps stay nearer to the server's model.",
        )
    reason = goal + "; mini-batches add noise, which a smaller lr averages out."
    if lr is None:
        return Advice("local_steps", local_steps, int(needed), "not judged", reason)
    factor = contraction(lr, rho, L, lowest)
    if lr * (L + rho) >= 2:
        return Advice(
            "local_steps", local_steps, int(needed), "diverges", f"{reason} With the present lr, no number is enough."
        )
    if factor >= 1:
        reason += f" With the present penalty, local curvature goes down to {rho + lowest:.3g}: nothing is certain."
        return Advice("local_steps", local_steps, int(needed), "not judged", reason)
    share = factor**local_steps
    verdict = "ok" if share <= ENOUGH else "too small"
    enough = steps_for(ENOUGH, factor)
    reason += f" With the present values, {local_steps} steps leave at most {share:.2g} of it; {enough} are enough."
    return Advice("local_steps", local_steps, int(needed), verdict, reason)
