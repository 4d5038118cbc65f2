"""Exact moments of a primal-dual method on scalar quadratics: a round is a linear map, drawn with its cohort.

The state is (e, y_1, ..., y_n): the error of the model, and tau times those of the duals. A visit moves client i by
-(H e + kappa y_i), as derived in docs/primal_dual.md.
"""

from __future__ import annotations

import numpy as np


def proximal(h):
    """H and kappa of an exact solution with penalty 1 / tau, for curvatures in units of 1 / tau."""
    h = np.asarray(h, dtype=float)
    return h / (1 + h), 1 / (1 + h)


def flow(h):
    """The same for infinitely many infinitely short gradient steps."""
    h = np.asarray(h, dtype=float)
    return -np.expm1(-h), -np.expm1(-h) / h


def descent(h, steps):
    """The same for gradient steps of length tau / steps."""
    h = np.asarray(h, dtype=float)
    moved = 1 - (1 - h / steps) ** steps
    return moved, moved / h


def round_map(a, b, w, visit, cohort):
    """The matrix of one round."""
    (H, kappa), cohort, n = visit, list(cohort), len(w)
    step = np.zeros((n, n + 1))  # minus the displacements of the cohort
    step[cohort, 0], step[cohort, 1 + np.asarray(cohort)] = H[cohort], kappa[cohort]
    result = np.eye(n + 1)
    result[1:] -= a * step
    result[0] += b * w @ result[1:]  # the server reads the new duals
    if cohort:
        result[0] -= w[cohort] @ step[cohort] / w[cohort].sum()
    return result


def mean_radius(a, b, w, visit, law):
    """Spectral radius of the mean of a round."""
    return radius(sum(p * round_map(a, b, w, visit, cohort) for cohort, p in law.items()))


def mean_square_radius(a, b, w, visit, law):
    """Growth of second moments by round: the spectral radius of X -> E M X M^T on symmetric X."""
    m = len(w) + 1
    rows, columns = np.triu_indices(m)
    total = np.zeros((rows.size, rows.size))
    for cohort, p in law.items():
        M = round_map(a, b, w, visit, cohort)
        straight = M[np.ix_(rows, rows)] * M[np.ix_(columns, columns)]
        crossed = M[np.ix_(rows, columns)] * M[np.ix_(columns, rows)]
        total += p * np.where(rows == columns, straight, straight + crossed)
    return radius(total)


def radius(matrix):
    return float(np.abs(np.linalg.eigvals(matrix)).max())
