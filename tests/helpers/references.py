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


def feddr_ii(clients, x0, cohorts, eta_hat, prox=zero, mode="fresh", start="local", solve=exact):
    """``x_hat`` is what the server holds of each client; ``upload_first`` counts work at the next turn."""
    n, x0 = len(clients), np.asarray(x0)
    x, w, uploaded = np.tile(x0, (n, 1)), np.zeros((n, len(x0))), np.tile(x0, (n, 1))
    x_bar = prox(x0, eta_hat)
    rows = [Row(x_bar=x_bar, x_tilde=x0, x=x, w=w, x_hat=uploaded)]
    for cohort in cohorts:
        x, w, uploaded = x.copy(), w.copy(), uploaded.copy()
        if mode == "upload_first":
            for i in cohort:
                uploaded[i] = x[i] + w[i]
            x_bar = prox(uploaded.mean(0), eta_hat) if cohort else x_bar
        for i in cohort:
            v = {"local": x[i], "server": x_bar, "centre": x_bar - w[i]}[start]
            x[i] = solve(clients[i], v, 0.0, 1 / eta_hat, x_bar - w[i])
            w[i] = w[i] + x[i] - x_bar
            if mode == "fresh":
                uploaded[i] = x[i] + w[i]
        if mode == "fresh" and cohort:
            x_bar = prox(uploaded.mean(0), eta_hat)
        rows.append(Row(x_bar=x_bar, x_tilde=uploaded.mean(0), x=x, w=w, x_hat=uploaded))
    return rows


def fedpd(clients, x0, talks, eta_hat, start="local", solve=exact):
    """``talks`` says of every round whether it ends with an exchange; ``own`` is x_0i before it, ``x_0`` after."""
    n, x_bar = len(clients), np.asarray(x0)
    x, lam, x_0 = np.tile(x_bar, (n, 1)), np.zeros((n, len(x_bar))), np.tile(x_bar, (n, 1))
    rows = [Row(x_bar=x_bar, x=x, lam=lam, own=x_0, x_0=x_0)]
    for talk in talks:
        v = {"local": x, "server": x_0, "centre": x_0 - eta_hat * lam}[start]
        x = np.array([solve(f, v[i], lam[i], 1 / eta_hat, x_0[i]) for i, f in enumerate(clients)])
        lam = lam + (x - x_0) / eta_hat
        own = x_0 = x + eta_hat * lam
        if talk:
            x_bar = own.mean(0)
            x_0 = np.tile(x_bar, (n, 1))
        rows.append(Row(x_bar=x_bar, x=x, lam=lam, own=own, x_0=x_0))
    return rows


def fedpd_ii(samples, x0, talks, eta_hat, gamma, refresh, batches):
    """Oracle II: ``samples[i]`` are the (A, b) of client i, ``batches[k][i]`` the lists of samples of its steps."""
    n, x_bar = len(samples), np.asarray(x0)
    slope = lambda i, x, which: np.mean([samples[i][j][0] @ x - samples[i][j][1] for j in which], axis=0)  # noqa: E731
    x, lam, x_0 = np.tile(x_bar, (n, 1)), np.zeros((n, len(x_bar))), np.tile(x_bar, (n, 1))
    v = np.zeros_like(x)
    rows = [Row(x_bar=x_bar, x=x, lam=lam, v=v)]
    for k, talk in enumerate(talks):
        x, v = x.copy(), v.copy()
        for i in range(n):
            if k % refresh == 0:
                v[i] = slope(i, x[i], range(len(samples[i])))
            for batch in batches[k][i]:
                new = (eta_hat * x[i] + gamma * x_0[i] - eta_hat * gamma * (v[i] + lam[i])) / (eta_hat + gamma)
                v[i] = v[i] + slope(i, new, batch) - slope(i, x[i], batch)
                x[i] = new
        lam = lam + (x - x_0) / eta_hat
        x_0 = x + eta_hat * lam
        if talk:
            x_bar = x_0.mean(0)
            x_0 = np.tile(x_bar, (n, 1))
        rows.append(Row(x_bar=x_bar, x=x, lam=lam, v=v))
    return rows


def feddyn(clients, x0, cohorts, a, start="server", solve=exact):
    """The server's h is the mean of all q_i."""
    n, x_bar = len(clients), np.asarray(x0)
    x, q = np.tile(x_bar, (n, 1)), np.zeros((n, len(x_bar)))
    rows = [Row(x_bar=x_bar, x=x, q=q, h=q.mean(0))]
    for cohort in cohorts:
        x, q = x.copy(), q.copy()
        for i in cohort:
            v = {"local": x[i], "server": x_bar, "centre": x_bar + q[i] / a}[start]
            x[i] = solve(clients[i], v, -q[i], a, x_bar)
            q[i] = q[i] - a * (x[i] - x_bar)
        if cohort:
            x_bar = x[cohort].mean(0) - q.mean(0) / a
        rows.append(Row(x_bar=x_bar, x=x, q=q, h=q.mean(0)))
    return rows


def scaffold(clients, x0, cohorts, option, steps, lr, server_lr=1.0):
    """The server's c is the mean of all c_i. ``steps`` and ``lr`` are those of each client."""
    n, x_bar = len(clients), np.asarray(x0)
    c_i = np.zeros((n, len(x_bar)))
    rows = [Row(x_bar=x_bar, c_i=c_i, c=c_i.mean(0))]
    for cohort in cohorts:
        c, new, points = c_i.mean(0), c_i.copy(), []
        for i in cohort:
            (A, b), y = clients[i], x_bar
            for _ in range(steps[i]):
                y = y - lr[i] * (A @ y - b - c_i[i] + c)
            new[i] = A @ x_bar - b if option == 1 else c_i[i] - c + (x_bar - y) / (steps[i] * lr[i])
            points.append(y)
        x_bar = x_bar + server_lr * (np.mean(points, axis=0) - x_bar) if cohort else x_bar
        c_i = new
        rows.append(Row(x_bar=x_bar, c_i=c_i, c=c_i.mean(0)))
    return rows


def largest(v, k):
    """The k entries of largest magnitude, the first of equal ones."""
    kept = sorted(range(len(v)), key=lambda j: (-abs(v[j]), j))[:k]
    return np.array([v[j] if j in kept else 0.0 for j in range(len(v))])


def fedlin(clients, x0, rounds, steps, lr, client_k=None, server_k=None):
    n, x_bar = len(clients), np.asarray(x0)
    slopes = np.array([A @ x_bar - b for A, b in clients])
    g, e, rho = slopes.mean(0), 0 * x_bar, np.zeros((n, len(x_bar)))
    rows = [Row(x_bar=x_bar, g=g, e=e, rho=rho)]
    for _ in range(rounds):
        points = []
        for i, (A, b) in enumerate(clients):
            x = x_bar
            for _ in range(steps[i]):
                x = x - lr[i] * (A @ x - b - slopes[i] + g)
            points.append(x)
        x_bar = np.mean(points, axis=0)
        slopes = np.array([A @ x_bar - b for A, b in clients])
        h = np.array([largest(v, client_k or len(v)) for v in rho + slopes])
        rho = rho + slopes - h
        g = largest(e + h.mean(0), server_k or len(x_bar))
        e = e + h.mean(0) - g
        rows.append(Row(x_bar=x_bar, g=g, e=e, rho=rho))
    return rows


def fedmid(clients, x0, cohorts, steps, lr, prox=zero, server_lr=1.0, counts=None):
    counts = np.ones(len(clients)) if counts is None else np.array(counts, dtype=float)
    x_bar = np.asarray(x0)
    rows = [Row(x_bar=x_bar)]
    for cohort in cohorts:
        points = []
        for A, b in (clients[i] for i in cohort):
            y = x_bar
            for _ in range(steps):
                y = prox(y - lr * (A @ y - b), lr)
            points.append(y)
        if cohort:
            mean = counts[cohort] @ np.array(points) / counts[cohort].sum()
            x_bar = prox(x_bar + server_lr * (mean - x_bar), server_lr * lr * steps)
        rows.append(Row(x_bar=x_bar))
    return rows


def feddualavg(clients, x0, cohorts, steps, lr, prox=zero, server_lr=1.0, counts=None):
    """``r`` counts the rounds in which somebody took part."""
    counts = np.ones(len(clients)) if counts is None else np.array(counts, dtype=float)
    z = x_bar = np.asarray(x0)
    rows, r = [Row(x_bar=x_bar, z=z)], 0
    for cohort in cohorts:
        duals = []
        for A, b in (clients[i] for i in cohort):
            zeta = z
            for k in range(steps):
                elapsed = server_lr * lr * r * steps + lr * k
                y = prox(zeta, elapsed) if elapsed else zeta
                zeta = zeta - lr * (A @ y - b)
            duals.append(zeta)
        if cohort:
            r += 1
            z = z + server_lr * (counts[cohort] @ np.array(duals) / counts[cohort].sum() - z)
            x_bar = prox(z, server_lr * lr * r * steps)
        rows.append(Row(x_bar=x_bar, z=z))
    return rows


def async_feddr(clients, x0, events, eta_hat, alpha=1.0, prox=zero, solve=exact):
    """``events`` are (client, delay) of the uploads in the order they are applied."""
    n, x0 = len(clients), np.asarray(x0)
    x, y, versions = np.tile(x0, (n, 1)), np.tile(x0, (n, 1)), [x0]
    for i, delay in events:
        y[i] = y[i] + alpha * (versions[len(versions) - 1 - delay] - x[i])
        x[i] = solve(clients[i], x[i], 0.0, 1 / eta_hat, y[i])
        versions.append(prox((2 * x - y).mean(0), eta_hat))
    return [Row(x_bar=version) for version in versions]


def fedprimaldual(clients, x0, cohorts, rho, sigma, lam, prox=zero, w=None, solve=exact):
    n, x_bar = len(clients), np.asarray(x0)
    w, z = np.full(n, 1 / n) if w is None else w, np.zeros((n, len(x_bar)))
    rows = [Row(x_bar=x_bar, z=z, z_bar=w @ z)]
    for cohort in cohorts:
        z, moved = z.copy(), np.zeros_like(x_bar)
        for i in cohort:
            d = solve(clients[i], x_bar, z[i], rho, x_bar) - x_bar
            z[i] += sigma * d
            moved = moved + w[i] * d / sum(w[j] for j in cohort)
        if cohort:
            x_bar = prox(x_bar + moved + lam * (w @ z), lam)
        rows.append(Row(x_bar=x_bar, z=z, z_bar=w @ z))
    return rows


def fedadmm_seen(clients, x0, cohorts, eta, prox=zero, w=None, start="server", solve=exact):
    """Models only; the mean is taken anew over the clients that have been seen."""
    n, x_bar = len(clients), np.asarray(x0)
    w = np.full(n, 1 / n) if w is None else w
    x, z, seen, rows = np.tile(x_bar, (n, 1)), np.zeros((n, len(x_bar))), set(), [x_bar]
    for cohort in cohorts:
        for i in cohort:
            x[i] = solve(clients[i], x[i] if start == "local" else x_bar, z[i], eta, x_bar)
            z[i] = z[i] + eta * (x[i] - x_bar)
        seen |= set(cohort)
        if cohort:
            mass = sum(w[i] for i in seen)
            x_bar = prox(sum(w[i] * (x[i] + z[i] / eta) for i in seen) / mass, 1 / eta)
        rows.append(x_bar)
    return rows
