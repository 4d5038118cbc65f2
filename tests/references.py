"""The algorithms again, in numpy, a few lines each, written from the specification and not from `lightning_fed`.

They keep the server's memory as the weighted mean of the clients' points and not as a sum of increments, so that a
wrong increment shows. Clients are pairs ``(A, b)`` of ``x.A.x/2 - b.x``; every run returns the states after each round,
index 0 being the start.
"""

from __future__ import annotations

from types import SimpleNamespace as Row

import numpy as np


def zero(v, t):
    return v


def soft(c):
    return lambda v, t: np.sign(v) * np.maximum(np.abs(v) - t * c, 0)


def shrink(c):
    return lambda v, t: v / (1 + t * c)


def clip(lo, hi):
    return lambda v, t: np.minimum(np.maximum(v, lo), hi)


def exact(f, start, linear, rho, center):
    """argmin f(x) + <linear, x> + rho/2 |x - center|^2."""
    A, b = f
    return np.linalg.solve(A + rho * np.eye(len(b)), b - linear + rho * center)


def descent(steps, lr):
    """The same, by gradient descent from ``start``."""

    def solve(f, start, linear, rho, center):
        (A, b), x = f, np.asarray(start)
        for _ in range(steps):
            x = x - lr * (A @ x - b + linear + rho * (x - center))
        return x

    return solve


def fedadmm(clients, x0, cohorts, eta, alpha=1.0, prox=zero, w=None, start="local", solve=exact, x_bar=None):
    n, x0 = len(clients), np.asarray(x0)
    w = np.full(n, 1 / n) if w is None else w
    x, z = np.tile(x0, (n, 1)), np.zeros((n, len(x0)))
    x_bar = x0 if x_bar is None else x_bar
    rows = [Row(x_bar=x_bar, x_tilde=x0, x=x, z=z, x_hat=x + z / eta)]
    for cohort in cohorts:
        x, z = x.copy(), z.copy()
        for i in cohort:
            c = alpha * x_bar + (1 - alpha) * x[i]
            v = {"local": x[i], "server": x_bar, "centre": c - z[i] / eta}[start]
            x[i] = solve(clients[i], v, z[i], eta, c)
            z[i] = z[i] + eta * (x[i] - c)
        if cohort:
            x_bar = prox(w @ (x + z / eta), 1 / eta)
        rows.append(Row(x_bar=x_bar, x_tilde=w @ (x + z / eta), x=x, z=z, x_hat=x + z / eta))
    return rows


def feddr(clients, x0, cohorts, eta_hat, alpha=1.0, prox=zero, w=None, start="local", solve=exact, init="x0"):
    n, x0 = len(clients), np.asarray(x0)
    w = np.full(n, 1 / n) if w is None else w
    x, y, x_bar = np.tile(x0, (n, 1)), np.tile(x0, (n, 1)), x0
    if init == "prox":
        x = np.array([solve(f, x0, 0.0, 1 / eta_hat, x0) for f in clients])
        x_bar = prox(w @ (2 * x - y), eta_hat)
    rows = [Row(x_bar=x_bar, x_tilde=w @ (2 * x - y), x=x, y=y, x_hat=2 * x - y)]
    for cohort in cohorts:
        x, y = x.copy(), y.copy()
        for i in cohort:
            y[i] = y[i] + alpha * (x_bar - x[i])
            v = {"local": x[i], "server": x_bar, "centre": y[i]}[start]
            x[i] = solve(clients[i], v, 0.0, 1 / eta_hat, y[i])
        if cohort:
            x_bar = prox(w @ (2 * x - y), eta_hat)
        rows.append(Row(x_bar=x_bar, x_tilde=w @ (2 * x - y), x=x, y=y, x_hat=2 * x - y))
    return rows


def fedprox(clients, x0, cohorts, mu=0.0, counts=None, server_lr=1.0, solve=exact):
    """FedAvg for ``mu=0``. ``counts`` are the numbers of samples; None weighs clients alike."""
    counts = np.ones(len(clients)) if counts is None else np.array(counts, dtype=float)
    x_bar = np.asarray(x0)
    rows = [Row(x_bar=x_bar)]
    for cohort in cohorts:
        if cohort:
            points = np.array([solve(clients[i], x_bar, 0.0, mu, x_bar) for i in cohort])
            mean = counts[cohort] @ points / counts[cohort].sum()
            x_bar = (1 - server_lr) * x_bar + server_lr * mean
        rows.append(Row(x_bar=x_bar))
    return rows


def two_operator_drs(prox_f, prox_g, x0, rounds, alpha=1.0):
    """Douglas-Rachford splitting of f + g; its outputs z_k."""
    x, outputs = x0, []
    for _ in range(rounds):
        y = prox_f(x)
        z = prox_g(2 * y - x)
        x = x + alpha * (z - y)
        outputs.append(z)
    return outputs
