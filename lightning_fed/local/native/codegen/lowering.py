"""Translate the recorded step of a small model to C: loops over arrays that stay in the processor's cache."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from lightning_fed.local.native.codegen.loops import TYPES, Place, Term, assign, reduce
from lightning_fed.local.native.codegen.matmul import call, function
from lightning_fed.local.native.codegen.operators import COMPARISONS, COPIES, EVERY, LOGIC, POWERS
from lightning_fed.local.native.codegen.views import is_view

aten = torch.ops.aten

#: Maximum bytes of the model and intermediate results, which lie on the stack and should stay in the cache.
MOST_BYTES = 2**20
#: Maximum lines of code: longer code takes long to compile.
MOST_LINES = 10_000


class NoCodeError(Exception):
    """A step cannot be translated to C; the message is the reason."""


class Source:
    """The C statements of a graph with inputs ``in0``, ``in1``, ... and results ``out0``, ``out1``, ...

    All are contiguous arrays with the shapes that the graph was recorded with.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.lines: list[str] = []
        self.functions: list[list[str]] = []
        self.scratch: list[Place] = []
        self.constants: list[Tensor] = []
        self.inputs: list[Place] = []
        self.outputs: list[Place] = []
        self.dtype: torch.dtype = next(iter(graph.graph.nodes)).meta["val"].dtype  # of the model, the first input
        self._values: dict[Node, Any] = {}
        for node in graph.graph.nodes:
            self._take(graph, node)
            if len(self.lines) + sum(map(len, self.functions)) > MOST_LINES:
                raise NoCodeError("it would be too long")
        if (self.outputs[0].meta.shape, self.outputs[0].meta.dtype) != (self.inputs[0].meta.shape, self.dtype):
            raise NoCodeError("the next model has another shape or type than the model")
        if sum(place.meta.nbytes for place in [self.inputs[0], self.outputs[0], *self.scratch]) > MOST_BYTES:
            raise NoCodeError("the model and its intermediate results are too large")

    def _take(self, graph: GraphModule, node: Any) -> None:
        if node.op == "placeholder":
            self.inputs.append(Place.new(f"in{len(self.inputs)}", node.meta["val"]))
            self._values[node] = self.inputs[-1]
        elif node.op == "get_attr":
            self.constants.append(getattr(graph, node.target).contiguous())
            self._values[node] = Place.new(f"constant{len(self.constants) - 1}", self.constants[-1])
        elif node.op == "output":
            for result in node.args[0]:
                self.outputs.append(Place.new(f"out{len(self.outputs)}", result.meta["val"]))
                self.lines += assign(self.outputs[-1], self._copied(result))
        else:
            self._values[node] = self._computed(node)

    def _computed(self, node: Any) -> Any:
        if node.target is operator.getitem:
            return self._values[node.args[0]][node.args[1]]
        if any(t.dtype.is_floating_point and t.dtype != self.dtype for t in tree_leaves(node.meta["val"])):
            refuse(node)  # the C functions of a source exist in one precision
        packet = node.target.overloadpacket
        if packet in _SPECIAL:
            return _SPECIAL[packet](self, node)
        if packet in COMPARISONS:
            numbers = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
            return self._term(node, f"{{0}} {COMPARISONS[packet]} {{1}}", torch.result_type(*numbers))
        if packet in LOGIC and node.meta["val"].dtype == torch.bool:
            return self._term(node, LOGIC[packet], torch.bool)
        if packet in COPIES:
            return self._copied(node.args[0], node)
        if packet in EVERY and node.meta["val"].dtype.is_floating_point:
            return self._term(node, EVERY[packet], node.meta["val"].dtype)
        if is_view(node) and node.target not in (aten.as_strided.default, aten.view.dtype):
            return self._view(node)
        refuse(node)

    def _term(self, node: Any, form: str, dtype: torch.dtype) -> Term:
        """Build an expression from a node's operands, converted to one type."""
        args, shape = list(node.args), node.meta["val"].shape
        alpha = node.kwargs.get("alpha", args.pop() if len(args) > 2 else 1)
        if set(node.kwargs) - {"alpha"} or (alpha != 1 and node.target not in (aten.add.Tensor, aten.sub.Tensor)):
            refuse(node)
        if alpha != 1:
            form = form.replace("{1}", f"{number(alpha, dtype)} * {{1}}")
        if len(args) > len(set(args)) and isinstance(args[0], Node):
            self._place(args[0])  # store an operand that occurs twice, so that it is computed once
        return Term(form, tuple(self._operand(arg, shape, dtype) for arg in args), shape)

    def _operand(self, arg: Any, shape: torch.Size, dtype: torch.dtype) -> Place | Term | str:
        if not isinstance(arg, Node):
            return number(arg, dtype)
        value: Place | Term = self._values[arg]
        # store an expression that is broadcast or used again: inlined, it would be computed several times
        if isinstance(value, Term) and (value.shape != shape or len(arg.users) > 1):
            value = self._place(arg)
        if arg.meta["val"].dtype == dtype:
            return value
        return Term("{0} != 0" if dtype == torch.bool else f"({TYPES[dtype]}){{0}}", (value,), shape)

    def _copied(self, source: Node, node: Node | None = None) -> Term:
        value = (node or source).meta["val"]
        return Term("{0}", (self._operand(source, value.shape, value.dtype),), value.shape)

    def _view(self, node: Any) -> Any:
        place = self._place(node.args[0])
        try:
            return _viewed(node, place)
        except RuntimeError:  # the strides do not allow this view, so view a contiguous copy
            copy = self._new(node.args[0])
            self.lines += assign(copy, self._copied(node.args[0]))
            return _viewed(node, copy)

    def _place(self, node: Node) -> Place:
        """The array of a node; generates the loops that fill it if the node is still an expression."""
        value = self._values[node]
        if isinstance(value, Term):
            self._values[node] = self._new(node)
            self.lines += assign(self._values[node], value)
        place: Place = self._values[node]
        return place

    def _new(self, node: Node) -> Place:
        return self._room(node.meta["val"])

    def _room(self, like: Tensor) -> Place:
        self.scratch.append(Place.new(f"t{len(self.scratch)}", like))
        return self.scratch[-1]

    def _product(self, node: Any) -> Place:
        self._floating(node)
        name, places = f"p{len(self.functions)}", [self._new(node), *(self._place(arg) for arg in node.args)]
        self.functions.append(function(name, *places))
        self.lines.append(call(name, *places))
        return places[0]

    def _floating(self, node: Any) -> Tensor:
        """The example tensor of a node; refuses integer tensors."""
        value: Tensor = node.meta["val"]
        return value if value.dtype.is_floating_point else refuse(node)

    def _reduced(self, node: Any, start: str, form: str) -> Place:
        """Reduce along the dimensions that a node names, or all."""
        own, source = self._floating(node), node.args[0].meta["val"]
        value = Term("{0}", (self._operand(node.args[0], source.shape, own.dtype),), source.shape)
        dims = node.args[1] if len(node.args) > 1 and node.args[1] else range(source.dim())
        kept = [dim not in [each % source.dim() for each in dims] for dim in range(source.dim())]
        shape = [size if keeps else 1 for size, keeps in zip(source.shape, kept, strict=True)]
        to = self._room(torch.empty(shape, dtype=self.dtype, device="meta"))
        self.lines += reduce(to, value, kept, start, form)
        return to.viewed(lambda meta: meta.view(own.shape))

    def _where(self, node: Any) -> Term:
        value = node.meta["val"]
        operands = [self._operand(node.args[0], value.shape, torch.bool)]
        operands += [self._operand(arg, value.shape, value.dtype) for arg in node.args[1:]]
        return Term("{0} ? {1} : {2}", tuple(operands), value.shape)

    def _power(self, node: Any) -> Term:
        source, exponent = node.args
        value = self._floating(node)
        if not isinstance(source, Node) or isinstance(exponent, Node) or exponent not in POWERS:
            return self._term(node, "FN(pow)({0}, {1})", value.dtype)
        return Term(POWERS[exponent], (self._operand(source, value.shape, value.dtype),), value.shape)

    def _clamped(self, node: Any) -> Term:
        value = self._floating(node)
        source, least, most = (*node.args, None, None)[:3]
        form = "{0}" if least is None else f"larger({{0}}, {number(least, value.dtype)})"
        form = form if most is None else f"smaller({form}, {number(most, value.dtype)})"
        return Term(form, (self._operand(source, value.shape, value.dtype),), value.shape)

    def _filled(self, node: Any, value: Any) -> Term:
        return Term(number(value, node.meta["val"].dtype), (), node.meta["val"].shape)

    def _joined(self, node: Any) -> Place:
        parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        to = self._new(node)
        pieces = torch.split(to.meta, [part.meta["val"].shape[dim] for part in parts], dim)
        for part, piece in zip(parts, pieces, strict=True):
            self.lines += assign(Place(to.name, piece), self._copied(part))
        return to

    def _pieces(self, node: Any) -> list[Place]:
        whole = self._place(node.args[0])
        # split the meta tensor: its pieces have the offsets and strides of views, so no code is generated
        pieces = node.target(whole.meta, *node.args[1:], **node.kwargs)
        return [Place(whole.name, piece) for piece in pieces]


_SPECIAL: dict[Any, Callable[[Source, Any], Any]] = {
    aten.mm: Source._product,
    aten.bmm: Source._product,
    aten.sum: lambda source, node: source._reduced(node, "0", "{0} + {1}"),
    aten.amax: lambda source, node: source._reduced(node, "-INFINITY", "larger({0}, {1})"),
    aten.where: Source._where,
    aten.pow: Source._power,
    aten.clamp: Source._clamped,
    aten.full: lambda source, node: source._filled(node, node.args[1]),
    aten.full_like: lambda source, node: source._filled(node, node.args[1]),
    aten.fill: lambda source, node: source._filled(node, node.args[1]),
    aten.scalar_tensor: lambda source, node: source._filled(node, node.args[0]),
    aten.empty_like: lambda source, node: source._filled(node, 0),  # other operators fill it before it is read
    aten.empty_permuted: lambda source, node: source._filled(node, 0),
    aten.cat: Source._joined,
    aten.split: Source._pieces,
    aten.split_with_sizes: Source._pieces,
    aten.unbind: Source._pieces,
}


def number(value: Any, dtype: torch.dtype) -> str:
    """Write a number as a C literal."""
    if not isinstance(value, bool | int | float):
        raise NoCodeError(f"{value!r} is not a number")
    if math.isfinite(value):
        whole = bool(value) if dtype == torch.bool else value
        return f"(({TYPES[dtype]}){float(value)!r})" if dtype.is_floating_point else f"{int(whole)}"
    return "NAN" if math.isnan(value) else f"({'-' if value < 0 else ''}INFINITY)"


def refuse(node: Any) -> NoReturn:
    raise NoCodeError(f"there is no C code for {node.target}")


def _viewed(node: Any, place: Place) -> Place:
    return place.viewed(lambda meta: node.target(meta, *node.args[1:], **node.kwargs))
