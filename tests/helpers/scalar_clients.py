"""Scalar clients that are not quadratic, for theorems that hold at every state of a federation.

Functions take arrays whose last axis is the clients; the other axes are states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LogCosh:
    """Clients with f'(x) = k tanh(c (x - m)) + mu (x - q), hence mu <= f'' <= k c + mu."""

    k: np.ndarray
    c: np.ndarray
    m: np.ndarray
    mu: np.ndarray
    q: np.ndarray

    @classmethod
    def draw(cls, rng, n):
        k, c, mu = rng.uniform(0.2, 2, n), rng.uniform(0.5, 3, n), rng.uniform(0.05, 0.5, n)
        return cls(k, c, rng.normal(size=n), mu, 2 * rng.normal(size=n))

    @property
    def L(self):  # noqa: N802 - the theorems' letter
        return float((self.k * self.c + self.mu).max())

    def grad(self, x):
        return self.k * np.tanh(self.c * (x - self.m)) + self.mu * (x - self.q)

    def solve(self, center, linear, rho):
        """argmin f_i(x) + linear_i x + rho/2 (x - center)^2 for every client."""
        return root(lambda x: self.grad(x) + linear + rho * (x - center), linear.shape)

    def optimum(self, w, l1=0.0):
        """The minimiser of sum_i w_i f_i(x) + l1 |x|."""
        slope = lambda x: self.grad(x[..., None]) @ w  # noqa: E731
        at_zero = float(slope(np.zeros(())))
        if abs(at_zero) <= l1:
            return 0.0
        return float(root(lambda x: slope(x) - np.sign(at_zero) * l1, ()))


@dataclass(frozen=True)
class Sines:
    """Clients with f(x) = k sin(c x + m), not convex, |f''| <= k c^2."""

    k: np.ndarray
    c: np.ndarray
    m: np.ndarray

    @classmethod
    def draw(cls, rng, n):
        return cls(rng.uniform(0.2, 2, n), rng.uniform(0.5, 2, n), rng.uniform(0, 6, n))

    @property
    def L(self):  # noqa: N802 - the theorems' letter
        return float((self.k * self.c**2).max())

    def __call__(self, x):
        return self.k * np.sin(self.c * x + self.m)

    def grad(self, x):
        return self.k * self.c * np.cos(self.c * x + self.m)


def root(slope, shape, radius=1e4):
    """Where an increasing ``slope`` vanishes, by halving down to the last digit."""
    low, high = np.full(shape, -radius), np.full(shape, radius)
    for _ in range(70):
        middle = (low + high) / 2
        below = slope(middle) < 0
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def soft(v, t):
    """prox of t |x|."""
    return np.sign(v) * np.maximum(np.abs(v) - t, 0)
