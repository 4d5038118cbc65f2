"""Vectors to take the prox of, and what it should be: conjugates in numpy, for the laws of `property/test_prox.py`."""

import fnmatch

import numpy as np
import torch

from lightning_fed.core.layout import Layout
from lightning_fed.prox import (
    L1,
    L2,
    Affine,
    Box,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    LInf,
    NonNegative,
    Nuclear,
    Scaled,
    Simplex,
    SquaredL2,
    Sum,
    Translated,
    Zero,
)

SHAPES = {"conv.weight": (2, 1, 1, 2), "conv.bias": (2,), "head.weight": (3, 2), "head.bias": (3,), "scale": ()}
LAYOUT = Layout(tuple(SHAPES), tuple(SHAPES.values()), torch.float64)
D = LAYOUT.numel
V = torch.tensor([3.0, -1.0, 0.5, 0.0, -2.0], dtype=torch.float64)
MATRIX = torch.tensor([3.0, 0.0, 4.0, 5.0], dtype=torch.float64)


def matrices(*shape):
    return Layout(("weight",), (shape,), torch.float64)


def where(name):
    """The places of a parameter in the flat vector."""
    sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
    start = sum(sizes[: list(SHAPES).index(name)])
    return list(range(start, start + int(np.prod(SHAPES[name]))))


def chosen_by(g):
    on = getattr(g, "on", None) or "*"
    patterns = [on] if isinstance(on, str) else on
    yes = [p for p in patterns if p[0] != "!"]
    no = [p[1:] for p in patterns if p[0] == "!"]

    def any_of(name, those):
        return any(fnmatch.fnmatch(name, p) for p in those)

    return [name for name in SHAPES if any_of(name, yes) and not any_of(name, no)]


def places(g):
    """Lists of entries, each of which is one vector (or matrix) to g."""
    names = chosen_by(g)
    if isinstance(g, Nuclear):
        return [np.reshape(where(n), (SHAPES[n][0], -1)) for n in names]
    if isinstance(g, GroupLasso) and g.by != "tensor":
        return [row for n in names for row in np.reshape(where(n), (SHAPES[n][0] if SHAPES[n] else 1, -1))]
    if isinstance(g, GroupLasso) or getattr(g, "scope", "global") == "per_tensor":
        return [np.array(where(n)) for n in names]
    return [np.array([index for n in names for index in where(n)])]


def conjugate_prox(g, u, s):
    """prox of s times the convex conjugate of g at u, from the formula of the conjugate."""
    match g:
        case Scaled(h, a):  # a g*(y / a)
            return a * conjugate_prox(h, u / a, s / a)
        case Translated():  # g*(y) + <shift, y>
            return conjugate_prox(g.g, u - s * g.shift.numpy(), s)
        case Sum(parts):  # each its own entries, 0 elsewhere
            out = sum(conjugate_prox(h, u, s) for h in parts)
            entrywise = [h for h in parts if isinstance(h, (L1, SquaredL2, ElasticNet, Box, NonNegative))]
            for i in range(D):
                acting = [h for h in entrywise if i in places(h)[0]]
                out[i] = u[i] - s * least(acting, u[i] / s, 1 / s) if len(acting) > 1 else out[i]
            return out
    out = np.zeros_like(u)  # where g does not depend on x, its conjugate is the indicator of 0
    for index in places(g):
        out[index] = block_conjugate_prox(g, u[index], s)
    return out


def least(parts, v, t):
    """The minimum of a sum of functions of one number plus (x - v)^2 / (2t), by bisection of its slope."""
    low, high = -1e3, 1e3
    for h in parts:
        match h:
            case Box(lo, hi):
                low, high = max(low, lo), min(high, hi)
            case NonNegative():
                low = max(low, 0.0)
    c1 = sum(getattr(h, "c1", 0.0) for h in parts) + sum(h.c for h in parts if isinstance(h, L1))
    c2 = sum(getattr(h, "c2", 0.0) for h in parts) + sum(h.c for h in parts if isinstance(h, SquaredL2))
    for _ in range(200):
        x = (low + high) / 2
        rises = c1 * (1 if x >= 0 else -1) + c2 * x + (x - v) / t > 0
        low, high = (low, x) if rises else (x, high)
    return x


def block_conjugate_prox(g, u, s):
    match g:
        case Zero():
            return 0 * u
        case L1(c):  # the indicator of the dual ball, as for the other norms
            return np.clip(u, -c, c)
        case SquaredL2(c):  # |y|^2 / (2c), the indicator of {0} for c = 0
            return u * (c / (c + s))
        case L2(c):
            return u * min(1, c / max(np.linalg.norm(u), 1e-300))
        case GroupLasso(c):
            c = c * (np.sqrt(u.size) if g.weight == "sqrt_size" else 1)
            return u * min(1, c / max(np.linalg.norm(u), 1e-300))
        case ElasticNet(c1, c2):  # the sum of max(|y| - c1, 0)^2 / (2 c2); beyond c1 the quadratic begins
            over = np.maximum(np.abs(u) - c1, 0)
            return np.sign(u) * (np.minimum(np.abs(u), c1) + over * (c2 / (c2 + s)))
        case LInf(c):
            return np.sign(u) * np.maximum(np.abs(u) - threshold(np.abs(u), c), 0)
        case Nuclear(c):
            left, sigma, right = np.linalg.svd(u, full_matrices=False)
            return left @ np.diag(np.minimum(sigma, c)) @ right
        case Box(lo, hi):  # the sum of max(lo y, hi y)
            return np.where(u > s * hi, u - s * hi, np.where(u < s * lo, u - s * lo, 0))
        case NonNegative():  # the indicator of y <= 0
            return np.minimum(u, 0)
        case L2Ball(radius):  # radius |y|_2
            return u * max(0, 1 - s * radius / max(np.linalg.norm(u), 1e-300))
        case L1Ball(radius):  # radius max |y|
            top = threshold(np.abs(u), s * radius)
            return np.clip(u, -top, top)
        case Simplex(total):  # total max y
            return np.minimum(u, threshold(u, s * total, signed=True))
        case Affine(A, b):  # <x0, y> for y in the range of A^T, x0 any solution
            A, b = A.numpy(), b.numpy()
            x0, basis = np.linalg.lstsq(A, b)[0], np.linalg.svd(A)[2][: np.linalg.matrix_rank(A)]
            return basis.T @ (basis @ (u - s * x0))
    raise AssertionError(f"no conjugate for {g}")


def threshold(a, total, signed=False):
    """The theta with sum(max(a - theta, 0)) = total, by bisection; at least 0 unless signed."""
    low, high = a.min() - total - 1 if signed else 0.0, max(a.max(), 0.0)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(a - middle, 0).sum() > total else (low, middle)
    return high
