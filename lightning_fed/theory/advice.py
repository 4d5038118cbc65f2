"""From what was measured to what is recommended: penalty, relaxation, step size, local steps."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.theory.residuals import contraction, penalty_bound, steps_for

#: Local work is enough when it shrinks the gradient of the local problem to this.
ENOUGH = 0.1

#: How a penalty is called by those who give it, and by those who give its inverse.
PENALTIES, STEPS = ("eta", "mu"), ("eta_hat", "s")


@dataclass(frozen=True)
class Measured:
    """What was seen: ``L`` and ``lowest`` are the ends of the curvature over all points and clients looked at.

    ``at_start`` and ``later`` are L at the first model and after ``steps`` gradient steps from it.
    """

    clients: int
    of: int
    samples: tuple[int, int]
    parameters: int
    L: float
    lowest: float
    at_start: float
    later: float
    steps: int
    method: str

    @property
    def negative(self) -> float:
        """The most negative curvature; -L where it is not known."""
        return -self.L if math.isnan(self.lowest) else min(self.lowest, 0.0)


@dataclass(frozen=True)
class Advice:
    """One setting: what the config has, what is recommended, the ``verdict`` on the former, and why."""

    setting: str
    now: float | None
    advised: float | None
    verdict: str
    reason: str


def advise(measured: Measured, algorithm: Algorithm[Any, Any, Any], lr: float | None, local_steps: int) -> list[Advice]:
    """Recommendations that fit each other; ``lr`` is None where local steps are not plain gradient steps."""
    penalty = _penalty(measured, algorithm, local_steps)
    advised = algorithm.traits.penalty if penalty is None else _as_penalty(penalty)
    found = [
        penalty,
        _relaxation(measured, algorithm),
        _lr(measured, algorithm.traits.penalty, advised, lr),
        _local_steps(measured, algorithm.traits.penalty, advised, lr, local_steps),
    ]
    return [advice for advice in found if advice is not None]


def practical_penalty(measured: Measured, local_steps: int) -> float:
    r"""The least :math:`\rho` whose local problem ``local_steps`` steps of :math:`1/(L+\rho)` solve to a tenth.

    The slowest direction has curvature :math:`\rho + m`, with m the most negative one of :math:`f_i`:

    .. math:: \Big(1 - \frac{\rho+m}{L+\rho}\Big)^T \le \tfrac1{10} \iff \rho \ge 10^{1/T}(L-m) - L
    """
    return math.pow(ENOUGH, -1 / local_steps) * (measured.L - measured.negative) - measured.L


def _penalty(measured: Measured, algorithm: Algorithm[Any, Any, Any], local_steps: int) -> Advice | None:
    rho, alpha, L = algorithm.traits.penalty, algorithm.traits.relaxation, measured.L
    if alpha is None:
        return None
    bound = penalty_bound(L, min(alpha, 1.0))  # where alpha is too large, it is alpha that should change
    theory, practical = 1.1 * bound, min(practical_penalty(measured, local_steps), 1.1 * bound)
    reason = (
        f"The theorem wants a penalty above {bound:.4g} = {bound / L:.3g} L; {theory:.4g} would do. It is cautious:"
        f" from {practical:.4g} on, {local_steps} local steps solve the local problem to a tenth, even along the"
        f" lowest curvature {'assumed' if math.isnan(measured.lowest) else 'seen'}, {measured.negative:.3g}."
    )
    if rho > 10 * bound:
        return _in_its_words(algorithm, rho, theory, "too large", f"{reason} Far above the bound every round is short.")
    if rho >= practical * (1 - 1e-9):
        inside = "" if rho > bound else " Below the theorem's bound: no guarantee where losses are not convex."
        return _in_its_words(algorithm, rho, rho, "ok", reason + inside)
    return _in_its_words(algorithm, rho, practical, "too small", f"{reason} A smaller one may work, without a promise.")


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


def _relaxation(measured: Measured, algorithm: Algorithm[Any, Any, Any]) -> Advice | None:
    alpha, rho = algorithm.traits.relaxation, algorithm.traits.penalty
    if alpha is None:
        return None
    limit = 2 - 2 * measured.L / rho
    if alpha <= 1:
        reason = "1 is the paper's method, and what the theorem covers for inexact local solutions."
        if limit > 1:
            reason += f" With this penalty and near-exact local work it may go up to 2 - 2 L / penalty = {limit:.3g}."
        return Advice("alpha", alpha, alpha, "ok", reason)
    reason = f"Above 1 the theorem wants exact local work and alpha below 2 - 2 L / penalty = {limit:.3g}."
    return Advice("alpha", alpha, alpha if alpha < limit else 1.0, "ok" if alpha < limit else "too large", reason)


def _lr(measured: Measured, rho: float, advised_rho: float, lr: float | None) -> Advice:
    L, advised = measured.L, 1 / (measured.L + advised_rho)
    reason = f"Gradient steps diverge from 2 / (L + penalty) = {2 / (L + rho):.4g} on; 1 / (L + penalty) is quickest."
    if lr is None:
        return Advice("lr", None, None, "not judged", f"The optimiser is not plain SGD. {reason}")
    stability = lr * (L + rho)
    measured_as = f" Now lr * (L + penalty) = {stability:.3g}."
    if stability >= 2:
        return Advice("lr", lr, advised, "diverges", reason + measured_as)
    if stability < 0.01:
        return Advice("lr", lr, advised, "too small", reason + measured_as)
    room = " Little room: L is measured from below." if stability > 1.5 else ""
    return Advice("lr", lr, advised, "ok", reason + measured_as + room)


def _local_steps(measured: Measured, rho: float, advised_rho: float, lr: float | None, local_steps: int) -> Advice:
    L, lowest = measured.L, measured.negative
    needed = steps_for(ENOUGH, contraction(1 / (L + advised_rho), advised_rho, L, lowest))
    goal = f"{needed} full gradient steps with the values advised shrink the local problem's gradient tenfold"
    if needed == math.inf:
        return Advice(
            "local_steps",
            local_steps,
            None,
            "not judged",
            "There is no penalty to make the local problem strongly convex, so no number of steps is enough to solve"
            " it: fewer steps stay nearer to the server's model.",
        )
    reason = goal + "; mini-batches add noise, which a smaller lr averages out."
    if lr is None:
        return Advice("local_steps", local_steps, int(needed), "not judged", reason)
    factor = contraction(lr, rho, L, lowest)
    if lr * (L + rho) >= 2:
        return Advice("local_steps", local_steps, int(needed), "diverges", f"{reason} With lr as it is, none will do.")
    if factor >= 1:
        reason += f" With the penalty as it is, curvature down to {rho + lowest:.3g} remains: nothing is certain."
        return Advice("local_steps", local_steps, int(needed), "not judged", reason)
    share = factor**local_steps
    verdict = "ok" if share <= ENOUGH else "too small"
    reason += f" As it is, {local_steps} steps leave {share:.2g} of it at worst; {steps_for(ENOUGH, factor)} would do."
    return Advice("local_steps", local_steps, int(needed), verdict, reason)
