"""Functions of stacked tensors, recorded once and replayed without Python; compiled where that is wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

log = logging.getLogger(__name__)

Graph = Callable[..., Sequence[Tensor]]


class Graphs:
    """Recorded functions by key and shape of their inputs.

    Args:
        compile: make machine code of them. The first result of each is compared with the recorded function's; one that
            does not compile or differs is replayed as it was recorded.
    """

    def __init__(self, compile: bool) -> None:
        self.compile = compile
        self._graphs: dict[Hashable, Graph] = {}

    def get(self, key: Hashable, function: Graph, inputs: Sequence[Tensor]) -> Graph:
        """The function as a graph for inputs of this shape; ``key`` tells apart what the inputs do not."""
        whole = (key, *((t.shape, t.stride(), t.dtype, t.device) for t in inputs))
        if whole not in self._graphs:
            # plain tensors: those made in inference mode cannot be differentiated
            with torch.inference_mode(False), torch.no_grad():
                plain = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
                for copy, t in zip(plain, inputs, strict=True):
                    copy.copy_(t)
                graph: Graph = make_fx(function)(*plain)
                self._graphs[whole] = self._compiled(graph, plain) if self.compile else graph
        return self._graphs[whole]

    def _compiled(self, graph: Any, inputs: Sequence[Any]) -> Any:
        try:
            compiled: Any = torch._inductor.compile(graph, list(inputs))
            for ours, theirs in zip(compiled(*inputs), graph(*inputs), strict=True):
                torch.testing.assert_close(ours, theirs)
        except Exception as error:
            log.info("Local steps are not compiled: %s: %s", type(error).__name__, str(error).split("\n")[0])
            return graph
        return compiled
