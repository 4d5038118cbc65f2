r"""The theory's guarantees in numbers: rounds, step sizes and accuracies.

Throughout, L is a Lipschitz constant of every client's gradient, ``eta`` the *penalty* of FedADMM, and
:math:`h = 1/\eta` the *step* of FedDR. G is the gradient of the objective if g = 0, the gradient mapping otherwise.

These numbers are worst cases, larger than observed values by a factor of 40 and more. The terms for
inexact local solutions (:math:`\rho_1, \rho_2, C_2, C_3`) are the paper's and were not confirmed independently; those
of :class:`ExactBounds` were derived and checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_fed.core.validation import is_number, shown

#: A penalty within this relative distance of its bound counts as on the bound, so that rounding cannot let it pass.
SLACK = 1e-12


def eta_min(L: float, gamma4: float) -> float:
    r"""The penalty that FedADMM's ``eta`` must exceed, for inexact local solutions and ``alpha = 1``.

    .. math:: \eta_{\min} = \frac{4L(1+2\gamma_4)}{\sqrt{9-16\gamma_4(1+4\gamma_4)}-1}
                          = L\,\frac{1+\sqrt{9-16\gamma_4(1+4\gamma_4)}}{2(1-4\gamma_4)}

    The second form, which does not cancel near 1/4, is computed. :math:`\eta_{\min} \to 2L` as :math:`\gamma_4 \to 0`.

    >>> round(eta_min(1.0, 0.05), 6)
    2.397181
    """
    _positive("L", L, LIPSCHITZ)
    _check_gamma4(gamma4)
    return L * (1 + math.sqrt(9 - 16 * gamma4 * (1 + 4 * gamma4))) / (2 * (1 - 4 * gamma4))


@dataclass(frozen=True)
class Bounds:
    r"""Convergence of FedADMM (``alpha = 1``) with local solutions up to :math:`\|x_i - x_i^*\| \le \varepsilon_{i,k}`.

    .. math::
        \frac1{K+1}\sum_{k\le K} E\|G(\bar x^k)\|^2 &\le \frac{C_1[F(x^0)-F^*]}{K+1}
            + \frac1{n(K+1)}\sum_{k\le K}\sum_i (C_2\varepsilon_{i,k}^2 + C_3\varepsilon_{i,k+1}^2) \\
        q &= 2 - (Lh+1) - 2L^2h^2 - 4\gamma_4(1+L^2h^2), \qquad
        \beta = \frac{\hat p\,q}{2h(1+\gamma_1)(1+L^2h^2)} \\
        \rho_2 &= \frac{2(1+hL)^2}{\gamma_4h} + \frac{1+h^2L^2}{h} + \frac{q}{2h(1+L^2h^2)\gamma_1}, \qquad
        \rho_1 = \rho_2 + \frac{1+h^2L^2}{h} \\
        C_1 &= \frac{2(1+hL)^2(1+\gamma_2)}{h^2\beta}, \qquad C_2 = \rho_1C_1, \qquad
        C_3 = \rho_2C_1 + \frac{(1+hL)^2(1+\gamma_2)}{h^2\gamma_2}

    Args:
        L: Lipschitz constant of the clients' gradients.
        eta: penalty; must exceed :func:`eta_min`.
        gamma1: any positive number; small ones lower C1 and raise C2 and C3.
        gamma2: as ``gamma1``.
        gamma4: in (0, 1/4); small ones allow a smaller ``eta``.
        p_hat: the least probability of a client, ``sampler.inclusion_probabilities(n).min()``.

    >>> row = Bounds(L=1.0, eta=4.0, gamma1=1.0, gamma2=1.0, gamma4=0.05, p_hat=1 / 3)
    >>> round(row.C1, 6), round(row.C2, 3), round(row.C3, 3)
    (772.727273, 200350.0, 197115.909)
    >>> row.rounds(epsilon2=1.0, gap=10.0, D=0.01)
    11701

    Reference: arXiv:2203.15104, whose constants these are. In our own derivation the :math:`\gamma_1`-term of
    :math:`\rho_2` is :math:`(1+hL)^2` times larger, and the :math:`\gamma_2`-term of :math:`C_3` belongs to
    :math:`C_2`; neither matters to :meth:`rounds` unless :math:`\gamma_1` is much below :math:`\gamma_4`.
    """

    L: float
    eta: float
    gamma1: float
    gamma2: float
    gamma4: float
    p_hat: float
    q: float = field(init=False)
    beta: float = field(init=False)
    rho1: float = field(init=False)
    rho2: float = field(init=False)
    C1: float = field(init=False)
    C2: float = field(init=False)
    C3: float = field(init=False)

    def __post_init__(self) -> None:
        least = eta_min(self.L, self.gamma4)
        _exceeds("eta", self.eta, least, f"eta_min(L={self.L:g}, gamma4={self.gamma4:g})", "eta, or lower gamma4")
        _positive("gamma1", self.gamma1, "It balances C1 against C2 and C3; start from 1.0.")
        _positive("gamma2", self.gamma2, "It balances C1 against C3; start from 1.0.")
        _positive("p_hat", self.p_hat, PROBABILITY, upper=1.0)
        for name, value in self._constants().items():
            object.__setattr__(self, name, value)

    def _constants(self) -> dict[str, float]:
        h = 1 / self.eta
        Lh = self.L * h
        one = 1 + Lh**2
        q = 2 - (Lh + 1) - 2 * Lh**2 - 4 * self.gamma4 * one
        beta = self.p_hat * q / (2 * h * (1 + self.gamma1) * one)
        rho2 = 2 * (1 + Lh) ** 2 / (self.gamma4 * h) + one / h + q / (2 * h * one * self.gamma1)
        rho1 = rho2 + one / h
        square = (1 + Lh) ** 2 * (1 + self.gamma2) / h**2
        C1 = 2 * square / beta
        C3 = rho2 * C1 + square / self.gamma2
        return {"q": q, "beta": beta, "rho1": rho1, "rho2": rho2, "C1": C1, "C2": rho1 * C1, "C3": C3}

    def mean_square(self, K: int, gap: float, D: float) -> float:
        r"""Bound of :math:`\frac1{K+1}\sum_{k\le K} E\|G(\bar x^k)\|^2`; the arguments as in :meth:`rounds`."""
        return self._total(gap, D) / (K + 1)

    def rounds(self, epsilon2: float, gap: float, D: float) -> int:
        r""":math:`K = \lfloor (C_1[F(x^0)-F^*] + (C_2+C_3)D) / \varepsilon^2 \rfloor`: after round K the mean is small.

        Args:
            epsilon2: wanted bound of the mean of :math:`E\|G(\bar x^k)\|^2` over rounds 0 to K.
            gap: :math:`F(x^0) - F^*`, or an upper bound of it.
            D: upper bound of :math:`\frac1n\sum_i\sum_{k\le K+1}\varepsilon_{i,k}^2`. A client that is not drawn keeps
                its error, which counts again in every such round. There is no default, as this is *not* 0 even for
                exact solvers: clients that start at :math:`x^0` have :math:`\varepsilon_{i,0} = \|x^0 -
                \mathrm{prox}_{f_i/\eta}(x^0)\|` until they are first drawn. (If they start at the prox instead it is
                0, but then ``gap`` must be that of :class:`ExactBounds`.)
        """
        _positive("epsilon2", epsilon2, "It is the wanted mean of |G|^2.")
        return math.floor(self._total(gap, D) / epsilon2)

    def _total(self, gap: float, D: float) -> float:
        _positive("gap", gap, "It is F(x0) - F*; a lower bound of F, such as 0, will do for F*.", zero=True)
        _positive("D", D, "It is the sum of squared local errors, the first ones included.", zero=True)
        return self.C1 * gap + (self.C2 + self.C3) * D


@dataclass(frozen=True)
class ExactBounds:
    r"""Convergence of FedADMM and FedDR with exact local solutions, for any relaxation ``alpha`` in (0, 2).

    With :math:`V_k = g(\bar x^k) + \frac1n\sum_i f_i(x_i^k) + \langle\nabla f_i(x_i^k), \bar x^k - x_i^k\rangle +
    \frac\eta2\|\bar x^k - x_i^k\|^2`, which never rises,

    .. math::
        \frac1{K+1}\sum_{k\le K} E\|G(\bar x^k)\|^2 \le \frac{C_1[V_0-F^*]}{K+1}, \quad
        q = (1+Lh)(2-\alpha-2Lh), \quad \beta = \frac{\hat p\,\alpha q}{2h(1+L^2h^2)}, \quad
        C_1 = \frac{2(1+hL)^2}{h^2\beta}

    for :math:`\eta > 2L/(2-\alpha)`. For ``alpha = 1`` this is the limit of :class:`Bounds` as the gammas vanish.
    It needs an exact solution of every client before round 0 (``FedDR(init="prox")``), and then :math:`V_0` may exceed
    :math:`F(x^0)`; clients that start at :math:`x^0` are not exact before they are first drawn, see :class:`Bounds`.

    >>> round(ExactBounds(L=1.0, eta=4.0, p_hat=1 / 3).C1, 9)
    127.5
    """

    L: float
    eta: float
    p_hat: float
    alpha: float = 1.0
    q: float = field(init=False)
    beta: float = field(init=False)
    C1: float = field(init=False)

    def __post_init__(self) -> None:
        least = exact_eta_min(self.L, self.alpha)
        _exceeds("eta", self.eta, least, "2 L / (2 - alpha)", "eta, or lower alpha")
        _positive("p_hat", self.p_hat, PROBABILITY, upper=1.0)
        h = 1 / self.eta
        Lh = self.L * h
        q = (1 + Lh) * (2 - self.alpha - 2 * Lh)
        beta = self.p_hat * self.alpha * q / (2 * h * (1 + Lh**2))
        for name, value in {"q": q, "beta": beta, "C1": 2 * (1 + Lh) ** 2 / (h**2 * beta)}.items():
            object.__setattr__(self, name, value)

    def rounds(self, epsilon2: float, gap: float) -> int:
        r""":math:`K = \lfloor C_1[V_0-F^*]/\varepsilon^2 \rfloor`, where ``gap`` is :math:`V_0 - F^*`."""
        _positive("epsilon2", epsilon2, "It is the wanted mean of |G|^2.")
        _positive("gap", gap, "It is V_0 - F*; a lower bound of F, such as 0, will do for F*.", zero=True)
        return math.floor(self.C1 * gap / epsilon2)


def exact_eta_min(L: float, alpha: float = 1.0) -> float:
    r""":math:`2L/(2-\alpha)`: the penalty that ``eta`` must exceed when local solutions are exact.

    >>> exact_eta_min(1.0), exact_eta_min(1.0, alpha=1.5)
    (2.0, 4.0)
    """
    _positive("L", L, LIPSCHITZ)
    if not is_number(alpha) or not 0 < alpha < 2:
        raise ValueError(f"alpha must lie in (0, 2), got {shown(alpha)}. 1 is plain FedADMM; 2 is not covered.")
    return 2 * L / (2 - alpha)


def async_step_limit(L: float, alpha: float, n: int, tau: int) -> float:
    r"""The step :math:`1/\eta` must stay below this in asynchronous mode, when no upload is later than ``tau``.

    .. math::
        c = \max\Big(0, \frac{2\tau^2-n}{n^2}\Big), \quad \alpha < \frac1{1+c}, \quad
        \frac1\eta < \frac{-\alpha+\sqrt{\alpha^2+4(2+\alpha+2\alpha c)(2-2\alpha-2\alpha c)}}{2L(2+\alpha+2\alpha c)}

    Sufficient for exact local solutions and uniform weights, by our own derivation, tried in one setting only: a
    guide, not a guarantee. It does not cover ``alpha = 1``.

    Args:
        tau: largest number of uploads applied between a client's reading of the model and its own upload.

    >>> round(async_step_limit(L=1.0, alpha=0.5, n=30, tau=10), 6)
    0.464068
    """
    _positive("L", L, LIPSCHITZ)
    _whole("n", n, 1)
    _whole("tau", tau, 0)
    c = max(0.0, (2 * tau**2 - n) / n**2)
    if not is_number(alpha) or not 0 < alpha < (1 - SLACK) / (1 + c):
        limit = f"1/(1+c) = {1 / (1 + c):.6g} for n={n} and tau={tau}"
        raise ValueError(
            f"alpha must be positive and below {limit}, got {shown(alpha)}. Lower it, or allow less delay."
        )
    a = 2 + alpha + 2 * alpha * c
    return (-alpha + math.sqrt(alpha**2 + 4 * a * (2 - 2 * alpha - 2 * alpha * c))) / (2 * L * a)


def summable_error2(k: int, D: float) -> float:
    r""":math:`\varepsilon_k^2 = D/((k+1)(k+2))`: squared errors allowed in rounds k = 0, 1, ...; together they are D.

    Those of the first K rounds add up to :math:`D(1-1/(K+1))`, if all clients take part in each.

    >>> sum(summable_error2(k, D=1.0) for k in range(999))
    0.999...
    """
    _whole("k", k, 0)
    _positive("D", D, "It is the sum of squared errors over all rounds.")
    return D / ((k + 1) * (k + 2))


def distance_to_solution(residual: float, rho: float, L: float) -> float:
    r"""Certificate :math:`\|x-x^*\| \le r/(\rho-L)` of a local solution, from its :math:`r = \|\nabla\varphi(x)\|`.

    Here :math:`\varphi(x) = f_i(x) + \langle l, x\rangle + \frac\rho2\|x-c\|^2` is the local problem, strongly
    convex if :math:`\rho > L`, and :math:`x^*` its solution.

    >>> distance_to_solution(residual=0.3, rho=4.0, L=1.0)
    0.09999999999999999
    """
    _positive("residual", residual, "It is the norm of the local problem's gradient.", zero=True)
    return residual / _convexity(rho, L)


def residual_for(epsilon: float, rho: float, L: float) -> float:
    r""":math:`r = (\rho-L)\varepsilon`: the residual at which local work is within ``epsilon`` of the solution.

    >>> residual_for(epsilon=0.1, rho=4.0, L=1.0)
    0.30000000000000004
    """
    _positive("epsilon", epsilon, "It is the wanted distance to the local solution.")
    return _convexity(rho, L) * epsilon


LIPSCHITZ = "It is the Lipschitz constant of the clients' gradients; an upper bound will do."
PROBABILITY = "It is the least probability of a client, sampler.inclusion_probabilities(n).min()."


def _convexity(rho: float, L: float) -> float:
    _positive("L", L, LIPSCHITZ)
    _exceeds("rho", rho, L, "L", "the penalty")
    return rho - L


def _exceeds(name: str, value: float, least: float, called: str, what: str) -> None:
    if not is_number(value) or not least * (1 + SLACK) < value < math.inf:
        raise ValueError(f"{name} must be finite and exceed {called} = {least:.9g}, got {shown(value)}. Raise {what}.")


def _check_gamma4(gamma4: float) -> None:
    if not is_number(gamma4) or not 0 < gamma4 < 0.25:
        raise ValueError(f"gamma4 must lie in (0, 1/4), got {shown(gamma4)}. Small ones allow a smaller eta; try 0.05.")


def _positive(name: str, value: float, hint: str, *, zero: bool = False, upper: float = math.inf) -> None:
    if not is_number(value) or not (value >= 0 if zero else value > 0) or value == math.inf or value > upper:
        wanted = ("non-negative" if zero else "positive") + (
            " and finite" if upper == math.inf else f" and at most {upper:g}"
        )
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}. {hint}")


def _whole(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be a whole number >= {minimum}, got {value!r}.")
