"""FedAvgM, FedAdam, FedYogi, FedAdagrad and FedNova again, in numpy, written from the papers as in references.py.

Moments are sums over all rounds, and FedNova's directions sums over all gradients of a visit, so that a wrong increment
or a wrong weight shows.
"""

from __future__ import annotations

import numpy as np

from helpers import references


def fedopt(clients, x0, cohorts, step, counts=None, solve=references.exact):
    """FedAvg whose server moves by ``step(changes)``, the mean changes of all rounds so far with clients."""
    counts = np.ones(len(clients)) if counts is None else np.array(counts, dtype=float)
    x_bar, changes = np.asarray(x0), []
    rows = [references.Row(x_bar=x_bar)]
    for cohort in cohorts:
        if cohort:
            points = np.array([solve(clients[i], x_bar, 0.0, 0.0, x_bar) for i in cohort])
            changes.append(counts[cohort] @ (points - x_bar) / counts[cohort].sum())
            x_bar = x_bar + step(np.array(changes))
        rows.append(references.Row(x_bar=x_bar))
    return rows


def decayed(beta, terms):
    """sum_s beta^(t-s) terms_s, over all rounds s up to the last, t."""
    return beta ** np.arange(len(terms) - 1, -1, -1.0) @ terms


def adaptive(kind, lr, tau, beta1, beta2=None):
    """Steps of FedAdagrad, FedAdam and FedYogi, with their moments as sums over all rounds where there is one."""

    def step(changes):
        v = np.full(changes.shape[1], tau**2)
        if kind == "FedAdagrad":
            v = v + (changes**2).sum(0)
        elif kind == "FedAdam":
            v = beta2 ** len(changes) * v + (1 - beta2) * decayed(beta2, changes**2)
        for square in changes**2 if kind == "FedYogi" else ():
            v = np.where(v > square, v - (1 - beta2) * square, v + (1 - beta2) * square)
        return lr * (1 - beta1) * decayed(beta1, changes) / (np.sqrt(v) + tau)

    return step


def weights_of_gradients(steps, lr, momentum=0.0, mu=0.0):
    """FedNova's a_i as the paper writes it."""
    left = np.arange(steps, 0, -1.0)  # steps that a gradient takes part in
    if momentum:
        return (1 - momentum**left) / (1 - momentum)
    return (1 - lr * mu) ** (left - 1)


def fednova(clients, x0, cohorts, steps, lr, momentum=0.0, mu=0.0, tau_eff="steps", counts=None):
    """By the gradients G_i and their weights a_i; ``steps`` are those of each client."""
    counts = np.ones(len(clients)) if counts is None else np.array(counts, dtype=float)
    x_bar = np.asarray(x0)
    rows = [references.Row(x_bar=x_bar)]
    for cohort in cohorts:
        p, d, tau = counts[cohort] / counts[cohort].sum() if cohort else (), [], []
        for i in cohort:
            (A, b), x, velocity, gradients = clients[i], x_bar, 0.0, []
            for _ in range(steps[i]):
                gradients.append(A @ x - b)
                velocity = momentum * velocity + gradients[-1] + mu * (x - x_bar)
                x = x - lr * velocity
            a = weights_of_gradients(steps[i], lr, momentum, mu)
            d.append(a @ np.array(gradients) / a.sum())
            tau.append(steps[i] if tau_eff == "steps" else a.sum())
        x_bar = x_bar - (np.dot(p, tau) * lr * np.dot(p, d) if cohort else 0.0)
        rows.append(references.Row(x_bar=x_bar))
    return rows
