"""The theorems of docs/primal_dual.md, at random states, as means over all cohorts: none is drawn.

The round below is the method as specified (dual step sigma, server step lambda), not the form that the proofs use.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.sampling_references import nonempty, replaced, uniform
from helpers.scalar_clients import LogCosh, Sines, soft

STATES = 60
#: a, b, size of cohort, n: slow and fast duals, b below 1, at the edge of no condition, and beyond
STEPS = [
    (1.0, 1.0, 2, 4),
    (0.1, 1.0, 1, 5),
    (0.3, 0.5, 3, 4),
    (0.5, 2 / (2 - 0.25), 2, 4),
    (0.1, 3.0, 2, 5),
    (0.9, 5.0, 4, 4),
]


def everyone(law, n):
    return [(list(s), p) for s, p in law(tuple(range(n))).items()]


def server(x_bar, y, d, w, cohort, sigma, lam, l1=0.0):
    """The server and the duals y = -z after the displacements ``d`` of a cohort."""
    new = y.copy()
    new[..., cohort] -= sigma * d[..., cohort]
    mean = d[..., cohort] @ w[cohort] / w[cohort].sum()
    return soft(x_bar + mean - lam * (new @ w), lam * l1), new


class ExactRounds:
    """Random states of equal clients and what Theorem B says of them; tau = 1 / rho."""

    def __init__(self, seed, a, b, size, n, small):
        rng = np.random.default_rng(seed)
        self.f, self.w, self.a, self.b, self.s = LogCosh.draw(rng, n), np.full(n, 1 / n), a, b, size / n
        self.r = (b - 1) / (a * self.s)
        excess = max(0.0, 2 * self.r - b)
        self.tau = 2 / (excess * self.f.L) if small and excess else float(rng.uniform(0.1, 3))
        self.G = b * excess
        self.best = self.f.optimum(self.w)
        self.star = self.f.grad(np.full(n, self.best))
        self.x_bar = self.best + 2 * rng.normal(size=STATES)
        self.y = self.star + 2 * rng.normal(size=(STATES, n))
        self.x = self.f.solve(self.x_bar[:, None], -self.y, 1 / self.tau)
        self.cohorts = everyone(uniform(size), n)

    def V(self, x_bar, y):  # noqa: N802 - the theorem's letter
        a, b, r, s = self.a, self.b, self.r, self.s
        eta, p = self.tau * (y - self.star), x_bar + b * self.tau * (y @ self.w)
        mean = eta @ self.w
        squares = (eta**2) @ self.w
        return (p - self.best - r * mean) ** 2 + (b + self.G) / (a * s) * squares - b * r / (a * s) * mean**2

    def expected(self):
        """The mean of V over the cohorts of a round."""
        steps = (self.a / self.tau, self.b * self.tau)
        after = [
            (p, *server(self.x_bar, self.y, self.x - self.x_bar[:, None], self.w, s, *steps)) for s, p in self.cohorts
        ]
        return sum(p * self.V(x_bar, y) for p, x_bar, y in after)


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_theorem_b_is_an_identity_and_then_an_inequality(steps):
    case = ExactRounds(0, *steps, small=True)
    a, b, r, G, w = case.a, case.b, case.r, case.G, case.w
    size, n = steps[2:]
    delta = case.x_bar[:, None] - case.x
    eta = case.tau * (case.y - case.star)
    reached = eta + delta
    assert np.allclose(reached, case.tau * (case.f.grad(case.x) - case.star), atol=1e-9)
    before, after = case.V(case.x_bar, case.y), case.expected()
    omega = (n - size) / (size * (n - 1))
    gained, moved, held = ((case.x - case.best) * reached) @ w, delta**2 @ w, eta**2 @ w
    cohort = (1 - omega) * (delta @ w) ** 2 + omega * moved
    change = -2 * b * gained - (2 * b - a * b) * moved + b * cohort - b * (b - 2 * r) * (eta @ w) ** 2
    change += G * (reached**2 @ w - held - (1 - a) * moved)
    scale = 1 + np.abs(before)
    assert np.allclose(after - before, change, rtol=0, atol=1e-9 * scale.max())
    bound = before - 2 * b * gained + G * (reached**2 @ w) - (b + G) * (1 - a) * moved
    assert (before >= 0).all()
    assert (after <= bound + 1e-9 * scale).all()
    assert (after <= before + 1e-9 * scale).all()


def test_theorem_b_needs_its_condition_on_the_step():
    """With a hundred times the allowed step some states of a stiff, slow case go up: the test above can fail."""
    case = ExactRounds(1, 0.1, 5.0, 1, 5, small=True)
    case.tau *= 100
    case.x = case.f.solve(case.x_bar[:, None], -case.y, 1 / case.tau)
    assert (case.expected() > case.V(case.x_bar, case.y)).any()


@pytest.mark.parametrize("steps", [(0.5, 1.0, 2, 4), (0.3, 0.5, 3, 4), (0.1, 3.0, 2, 5)], ids=str)
def test_theorem_b_has_a_linear_rate(steps):
    case = ExactRounds(5, *steps, small=True)
    mu, L, a, b, r = float(case.f.mu.min()), case.f.L, case.a, case.b, case.r
    if case.G:  # strictly inside the condition
        case.tau *= 0.8 * L / (L + mu)
        case.x = case.f.solve(case.x_bar[:, None], -case.y, 1 / case.tau)
    c_x, c_eta = 2 * b * case.tau * mu * L / (mu + L), 2 * b / (case.tau * (mu + L)) - case.G
    M = 6 * b**2 + 2 * r**2 + (b + case.G + b * abs(r)) / (a * case.s)
    theta = min(c_x / 6, c_eta / (2 * M), (b + case.G) * (1 - a) / (6 + 2 * M))
    before = case.V(case.x_bar, case.y)
    assert 0 < theta < 1
    assert (case.expected() <= (1 - theta) * before + 1e-9 * (1 + before)).all()


UNEQUAL = np.array([0.1, 0.5, 0.15, 0.25])
#: laws in which a client's mean share of a cohort is its weight: one client by weight, or any size with equal weights
SHARES = {"one by weight": (UNEQUAL, replaced(1, UNEQUAL)), "any size": (np.full(4, 0.25), nonempty([0.3] * 4))}


@pytest.mark.parametrize("law", SHARES)
def test_any_law_is_covered_at_b_1_if_a_client_s_mean_share_of_a_cohort_is_its_weight(law):
    rng, n, a, tau = np.random.default_rng(2), 4, 0.4, 1.7
    w, cohorts, f = SHARES[law][0], everyone(SHARES[law][1], n), LogCosh.draw(rng, n)
    p = np.array([sum(q for s, q in cohorts if i in s) for i in range(n)])
    best = f.optimum(w)
    star = f.grad(np.full(n, best))
    x_bar, y = best + rng.normal(size=STATES), star + rng.normal(size=(STATES, n))
    d = f.solve(x_bar[:, None], -y, 1 / tau) - x_bar[:, None]

    def V(x_bar, y):  # noqa: N802 - the theorem's letter
        return (x_bar + tau * (y @ w) - best) ** 2 + tau**2 * ((y - star) ** 2 @ (w / (a * p)))

    after = sum(q * V(*server(x_bar, y, d, w, s, a / tau, tau)) for s, q in cohorts)
    eta = tau * (y - star)
    falls = 2 * ((d + (x_bar - best)[:, None]) * (eta - d)) @ w + (eta @ w) ** 2 + (1 - a) * (d**2 @ w)
    assert (after <= V(x_bar, y) - falls + 1e-9).all()
    assert (falls > 0).all()


@pytest.mark.parametrize("a", [0.1, 0.6, 1.0])
def test_theorem_b_prime_never_increases_with_g_and_any_weights(a):
    rng, n, lam, l1 = np.random.default_rng(3), 4, 0.8, 0.4
    f, w, sigma = LogCosh.draw(rng, n), UNEQUAL, a / lam
    best = f.optimum(w, l1)
    star = f.grad(np.full(n, best))
    x_bar, y = best + rng.normal(size=STATES), star + rng.normal(size=(STATES, n))

    def V(x_bar, y):  # noqa: N802 - the theorem's letter
        e, eta = x_bar - best, y - star
        return e**2 / lam + 2 * e * (eta @ w) + eta**2 @ w / sigma

    now, first = V(x_bar, y), V(x_bar, y)
    for _ in range(40):
        d = f.solve(x_bar[:, None], -y, 1 / lam) - x_bar[:, None]
        x_bar, y = server(x_bar, y, d, w, list(range(n)), sigma, lam, l1)
        before, now = now, V(x_bar, y)
        assert (now <= before + 1e-9).all()
    assert (now >= -1e-12).all()
    assert (now < first).all()


#: laws of cohorts of four clients with unequal probabilities, or equal ones under unequal weights
LAWS = {
    "uniform": uniform(2),
    "coins": nonempty([0.9, 0.2, 0.5, 0.4]),
    "replacement": replaced(2, [1, 2, 3, 4]),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("a", "b"), [(0.1, 3.0), (1.0, 1.0)])
def test_theorem_c_decreases_for_losses_that_are_not_convex(law, a, b):
    rng, n, steps, l1 = np.random.default_rng(4), 4, 5, 0.3
    f, w, cohorts = Sines.draw(rng, n), UNEQUAL, everyone(LAWS[law], n)
    p_min = min(sum(p for s, p in cohorts if i in s) for i in range(n))
    chi = max(sum(p / w[s].sum() for s, p in cohorts if i in s) for i in range(n))  # mean share / weight

    def constants(tau):
        epsilon = np.expm1(tau * f.L) / (tau * f.L) - 1
        delta = p_min * (1 - (1 - a * (1 - epsilon)) ** 2)
        return epsilon, delta, (1 + (1 / b + a) * (1 + epsilon) * np.sqrt(chi)) ** 2

    _, delta, C = constants(0.75 / f.L)
    tau = min(0.75, delta / np.sqrt(48 * C) / b) / f.L  # so small that the constants only improve
    epsilon, delta, C = constants(tau)
    lam = b * tau
    assert lam * f.L <= delta / np.sqrt(48 * C)
    x_bar, y = 3 * rng.normal(size=STATES), 2 * rng.normal(size=(STATES, n))
    x = np.repeat(x_bar[:, None], n, axis=1)
    for _ in range(steps):
        x = x - tau / steps * (f.grad(x) - y)
    d = x - x_bar[:, None]
    q = f.grad(x_bar[:, None]) - y
    assert (np.abs(-d / tau + y - f.grad(x_bar[:, None])) <= epsilon * np.abs(q) + 1e-12).all()

    def V(x_bar, y):  # noqa: N802 - the theorem's letter
        objective = f(x_bar[:, None]) @ w + l1 * np.abs(x_bar)
        return objective + 4 * lam * C / delta * ((f.grad(x_bar[:, None]) - y) ** 2 @ w)

    after, moved = 0.0, 0.0
    for s, p in cohorts:
        new, duals = server(x_bar, y, d, w, s, a / tau, lam, l1)
        after, moved = after + p * V(new, duals), moved + p * (new - x_bar) ** 2
    assert (after <= V(x_bar, y) - lam * C * (q**2 @ w) - moved / (4 * lam) + 1e-10).all()


def test_the_table_of_what_practice_is_covered():
    """Steps that Theorems B and C allow at a = 0.1, as docs/primal_dual.md prints them."""
    a = 0.1

    def by_c(b, s):
        return s * (1 - (1 - a) ** 2) / np.sqrt(48) / (1 + 1 / b + a) / b

    def by_b(b, s):
        return 2 * a * s / (2 * (b - 1) - a * b * s)

    assert np.round([by_c(3, 1 / 3), by_c(5, 1 / 3)], 4).tolist() == [0.0021, 0.0014]
    assert np.round([by_b(3, 1 / 3), by_b(5, 1 / 3), by_b(3, 1), by_b(5, 1)], 4).tolist() == [
        0.0171,
        0.0085,
        0.0541,
        0.0267,
    ]
    assert round(2 / (2 - a / 3), 3) == 1.017
