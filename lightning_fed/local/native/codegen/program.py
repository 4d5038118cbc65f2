"""Run many steps of many small models in C, client after client, without returning to Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.func import functionalize

from lightning_fed.core.compiler import built
from lightning_fed.local.native.codegen.loops import Place
from lightning_fed.local.native.codegen.lowering import NoCodeError, Source
from lightning_fed.local.native.threads import spread
from lightning_fed.local.tracing import trace

aten = torch.ops.aten

# the declarations of exp let the compiler call glibc's vector versions; larger and smaller return NaN as torch does
_HEAD = """
#include <math.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GLIBC__)
#pragma omp declare simd notinbranch
float expf(float);
#pragma omp declare simd notinbranch
double exp(double);
#endif
typedef %(type)s T;
typedef T V1;
#define VECTOR(n) typedef T V##n __attribute__((vector_size(n * sizeof(T)), aligned(sizeof(T)), may_alias));
VECTOR(2) VECTOR(4) VECTOR(8)
#define LOAD(n, from, skip) (*(const V##n *)(&(from) + skip))
#define STORE(n, to, skip, value) (*(V##n *)(&(to) + skip) = value)
#define FN(name) name%(suffix)s
static inline T square(T a) { return a * a; }
static inline T cube(T a) { return a * a * a; }
static inline T relu(T a) { return a < 0 ? 0 : a; }
static inline T larger(T a, T b) { return a > b || a != a ? a : b; }
static inline T smaller(T a, T b) { return a < b || a != a ? a : b; }
"""

_FUSING = """
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif
"""
_NOT_FUSING = """
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC pop_options
#endif
"""

#: Operators without C code, which torch decomposes into operators that have it.
_ALSO = (
    aten._log_softmax,
    aten._softmax,
    aten.addmm,
    aten.elu,
    aten.gelu,
    aten.hardtanh,
    aten.leaky_relu,
    aten.linalg_vector_norm,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
)


def _mean(x: Tensor, dim: Any = (), keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    total = x.sum(dim, keepdim=keepdim, dtype=dtype)
    if not total.numel():
        raise NoCodeError("it takes the mean of no numbers")
    return total / (x.numel() // total.numel())


def _var_mean(x: Tensor, dim: Any = (), *, correction: Any = 1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = tuple(dim or range(x.dim()))
    mean = _mean(x, dims, True)
    freedom = max(x.numel() // mean.numel() - correction, 0)
    variance = (x - mean).square().sum(dims, keepdim=True) / freedom
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


#: Decompositions of means and variances into sums, which have C code.
_BY_SUMS: dict[Any, Callable[..., Any]] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var_mean.correction: _var_mean,
}

#: C expression for the current row of an array, by the kind of the array.
_WHERE = {"client": "c", "shared": "0", "step": "s"}


class Steps:
    """A step as C code that runs all steps of all clients.

    Args:
        step: maps a model (1, d), other tensors of its client, tensors shared by all clients, and tensors of the step
            to the next model and other results.
        client, shared, varying: examples of these tensors, for one step of one client; the model comes first.
    """

    def __init__(
        self,
        step: Callable[..., Sequence[Tensor]],
        client: Sequence[Tensor],
        shared: Sequence[Tensor],
        varying: Sequence[Tensor],
    ) -> None:
        table = {**core_aten_decompositions(), **get_decompositions(_ALSO), **_BY_SUMS}
        examples = [torch.zeros_like(t) for t in (*client, *shared, *varying)]
        source = Source(trace(functionalize(step), examples, table))
        kinds = [*["client"] * len(client), *["shared"] * len(shared), *["step"] * len(varying)]
        self._run: Any = built(text(source, kinds)).run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._constants = source.constants  # kept, because C reads them by address
        self._results = [place.meta for place in source.outputs[1:]]

    def __call__(
        self,
        client: Sequence[Tensor],
        shared: Sequence[Tensor],
        varying: Sequence[Tensor],
        lengths: NDArray[np.int64],
        threads: int = 1,
    ) -> list[Tensor]:
        """Run ``lengths`` steps of the clients, which updates their models; return the results (K, ...) of K steps."""
        x, begins = client[0], np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
        assert len(lengths) == len(x)
        assert begins[-1] == len(varying[0])
        results = [x.new_empty((len(varying[0]), *meta.shape), dtype=meta.dtype) for meta in self._results]
        given = [t.contiguous() for t in (*client[1:], *shared, *varying)]
        assert x.is_contiguous()  # C writes into x itself, so a contiguous copy would lose the new models
        table = (ctypes.c_void_p * (1 + len(given) + len(self._constants) + len(results)))(
            *(t.data_ptr() for t in (x, *given, *self._constants, *results))
        )
        at = begins.ctypes.data
        spread(lambda first, last: self._run(table, at, first, last), len(x), least=threads)
        return results


def text(source: Source, kinds: Sequence[str]) -> str:
    """Assemble the C code for inputs of these kinds; the first input is the model."""
    size, model = source.inputs[0].meta.numel(), source.inputs[0].type
    constants = [Place.new(f"constant{i}", tensor) for i, tensor in enumerate(source.constants)]
    given = zip([*source.inputs[1:], *constants], [*kinds[1:], *["shared"] * len(constants)], strict=True)
    arrays = [(f"const {place.type}", place, kind) for place, kind in given]
    arrays += [(place.type, place, "step") for place in source.outputs[1:]]
    pointers = [
        f"{type} *restrict {place.name} = ({type} *)at[{i}] + {_WHERE[kind]} * {place.meta.numel()};"
        for i, (type, place, kind) in enumerate(arrays, start=1)
    ]
    # a and b swap after each step: a step reads the model in a and writes the next model to b
    return "\n".join(
        [
            _HEAD % {"type": model, "suffix": "##f" if model == "float" else ""},
            _FUSING,
            *(line for lines in source.functions for line in lines),
            _NOT_FUSING,
            "EXPORT void run(void **at, const size_t *begins, size_t first, size_t last) {",
            f"_Alignas(64) T now[{size}], next[{size}];",
            *(f"_Alignas(64) {place.type} {place.name}[{place.meta.numel()}];" for place in source.scratch),
            "for (size_t c = first; c < last; c++) {",
            f"T *x = (T *)at[0] + c * {size}, *a = now, *b = next;",
            "memcpy(a, x, sizeof now);",
            "for (size_t s = begins[c]; s < begins[c + 1]; s++) {",
            "const T *restrict in0 = a;",
            "T *restrict out0 = b;",
            *pointers,
            *source.lines,
            "b = a;",
            "a = out0;",
            "}",
            "memcpy(x, a, sizeof now);",
            "}",
            "}",
        ]
    )
