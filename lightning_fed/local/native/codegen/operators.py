"""Elementwise operators, as C code of their operands."""

import torch

aten = torch.ops.aten

EVERY = {
    aten.add: "{0} + {1}",
    aten.sub: "{0} - {1}",
    aten.mul: "{0} * {1}",
    aten.div: "{0} / {1}",
    aten.neg: "-{0}",
    aten.reciprocal: "1 / {0}",
    aten.relu: "relu({0})",
    aten.abs: "FN(fabs)({0})",
    aten.exp: "FN(exp)({0})",
    aten.log: "FN(log)({0})",
    aten.expm1: "FN(expm1)({0})",
    aten.log1p: "FN(log1p)({0})",
    aten.sqrt: "FN(sqrt)({0})",
    aten.rsqrt: "1 / FN(sqrt)({0})",
    aten.sin: "FN(sin)({0})",
    aten.cos: "FN(cos)({0})",
    aten.tanh: "FN(tanh)({0})",
    aten.erf: "FN(erf)({0})",
    aten.sigmoid: "1 / (1 + FN(exp)(-{0}))",
    aten.maximum: "larger({0}, {1})",
    aten.minimum: "smaller({0}, {1})",
}
#: Exponents for which torch does not call pow, so that C computes the same numbers.
POWERS = {
    0.5: "FN(sqrt)({0})",
    2: "square({0})",
    3: "cube({0})",
    -0.5: "1 / FN(sqrt)({0})",
    -1: "1 / {0}",
    -2: "1 / square({0})",
}
COPIES = {aten.clone, aten._to_copy}
COMPARISONS = {aten.eq: "==", aten.ne: "!=", aten.lt: "<", aten.le: "<=", aten.gt: ">", aten.ge: ">="}
LOGIC = {
    aten.logical_and: "{0} && {1}",
    aten.logical_or: "{0} || {1}",
    aten.logical_not: "!{0}",
    aten.bitwise_and: "{0} && {1}",
    aten.bitwise_or: "{0} || {1}",
    aten.bitwise_not: "!{0}",
}
