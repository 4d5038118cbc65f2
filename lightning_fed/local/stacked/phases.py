"""Split a recorded step into operators that every step needs, and operators that run once for many steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from lightning_fed.local.native.codegen.views import is_view
from lightning_fed.local.stacked.simplify import bound

aten = torch.ops.aten

#: Bytes up to which a result is kept for every step, even if the data of a step are smaller.
SMALL = 2**14


class _Places:
    """Assign each node of a step to one of four phases: before all steps, views, core of a step, after all steps."""

    def __init__(self, graph: Graph, params: Sequence[Node], data: Sequence[Node]) -> None:
        self.before = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")} - set(params)
        self.views = set(params)  # views of parameters stay valid in all steps, because x is updated in place
        self.core: set[Node] = set()
        self.after: set[Node] = set()
        needed = _ancestors(_results(graph)[0])
        limit = max(SMALL, sum(_bytes(node) for node in data))  # of a result that is kept for every step
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            used = set(node.all_input_nodes)
            if used <= self.before and _bytes(node) <= limit:
                self.before.add(node)
            elif is_view(node) and used <= self.views:
                self.views.add(node)
            elif node in needed or used & self.views or any(_bytes(each) > limit for each in used & self.core):
                # its inputs have to move to the core as well, such as a second forward pass that only a metric needs
                self.core |= {node} | (_ancestors(node) & self.after)
                self.after -= self.core
            else:
                self.after.add(node)


class Parts:
    """A function of parameters, shared tensors and the data of one step, split into phases to run many steps.

    Its first result is the gradient, which every step needs; the other results are needed only after all steps.

    Args:
        recorded: the function, of ``counts`` tensors of each kind; it writes into none of its inputs.
    """

    def __init__(self, recorded: GraphModule, counts: Sequence[int]) -> None:
        """Split the graph: ``made`` are results of data alone, ``seen`` views of parameters, ``left`` results of the
        core that the last phase reads, ``fed`` data and made tensors that the core reads."""
        graph = recorded.graph
        inputs = iter([node for node in graph.nodes if node.op == "placeholder"])
        params, shared, data = ([next(inputs) for _ in range(count)] for count in counts)
        _keep_from_writing(graph, params)  # first, so that the inserted copies are assigned to the core
        places = _Places(graph, params, data)
        first, *rest = _results(graph)

        def wanted(nodes: Iterable[Node], *users: Node) -> list[Node]:
            return [node for node in nodes if node in users or set(node.users) & (places.core | places.after)]

        made = wanted([n for n in graph.nodes if n in places.before and n.op == "call_function"], first, *rest)
        seen = wanted([n for n in graph.nodes if n in places.views], first)
        left = [n for n in graph.nodes if n in places.core and (n in rest or set(n.users) & places.after)]
        fed = [n for n in [*data, *made] if n is first or set(n.users) & places.core]
        self.views = _part(recorded, params, places.views, seen)
        self._before = _part(recorded, [*shared, *data], places.before, made)
        self.core = _part(recorded, [*seen, *shared, *fed], places.core, [first, *left])
        self.step = bound(self.core)  # a second form: the C code generator needs the core as ATen operators
        self.whole = bound(recorded)  # without phases, for a single step
        self._after = _part(recorded, [*left, *shared, *data, *made], places.after, rest)
        self._fed = [[*data, *made].index(node) for node in fed]
        self._shared = [None] * len(shared)
        self._counts = len(data), len(made), len(left)

    def before(self, shared: Sequence[Tensor], data: Sequence[Tensor]) -> list[Tensor]:
        """Return the data of T steps (T, ...) and all results that depend on data and shared tensors alone."""
        made = self._counts[1] and vmap(self._before, (*self._shared, *(0 for _ in data)))(*shared, *data)
        return [*data, *(made or ())]

    def fed(self, prepared: Sequence[Tensor]) -> list[Tensor]:
        """The prepared tensors that the core takes, besides parameters and shared tensors."""
        return [prepared[i] for i in self._fed]

    def after(self, left: Sequence[Tensor], shared: Sequence[Tensor], prepared: Sequence[Tensor]) -> list[Tensor]:
        """Compute the other results of T steps (T, ...) from the tensors that their cores left."""
        whole = vmap(self._after, (*(0 for _ in left), *self._shared, *(0 for _ in prepared)))
        return list(whole(*left, *shared, *prepared))


def _part(recorded: GraphModule, inputs: Sequence[Node], nodes: set[Node], outputs: Sequence[Node]) -> GraphModule:
    graph = Graph()
    env = {node: graph.placeholder(node.name) for node in inputs}
    for node in recorded.graph.nodes:
        constant = node.op == "get_attr" and (node in outputs or set(node.users) & nodes)
        if node not in env and (constant or (node in nodes and node.op == "call_function")):
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in outputs))
    return GraphModule(recorded, graph)


def _keep_from_writing(graph: Graph, params: Sequence[Node]) -> None:
    """Replace results that are views of parameters by copies, because the next step overwrites parameters."""
    views, output = set(params), next(node for node in graph.nodes if node.op == "output")
    for node in graph.nodes:
        if is_view(node) and views.intersection(node.all_input_nodes):
            views.add(node)
    for node in _results(graph)[1:]:
        if node in views:
            with graph.inserting_before(output):
                copied = graph.call_function(aten.clone.default, (node,))
            copied.meta = dict(node.meta)
            output.replace_input_with(node, copied)


def _results(graph: Graph) -> list[Node]:
    results: list[Node] = list(next(node for node in graph.nodes if node.op == "output").args[0])
    return results


def _ancestors(node: Node) -> set[Node]:
    found, todo = {node}, [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return found


def _bytes(node: Node) -> int:
    return sum(value.numel() * value.element_size() for value in tree_leaves(node.meta.get("val")) if value is not None)
