from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_fed.callbacks.base import notify
from lightning_fed.core import Broadcast, Reply
from lightning_fed.local.module import ModuleLocal
from lightning_fed.local.workspace import Workspace
from lightning_fed.measure import batch_gradient, client_gradient
from lightning_fed.remedies import remedy_for
from lightning_fed.round import Step
from lightning_fed.store import ClientId
from lightning_fed.vector import Layout, buffers_of, clones, is_finite
from lightning_fed.visit import ClientLoop, Visit

if TYPE_CHECKING:
    from lightning_fed.store import MemoryStore


class ClientError(RuntimeError):
    """A client's training failed; the message names round and client, the cause is chained."""


class DivergenceError(ClientError):
    """A client's loss or model is not finite."""


class SequentialEngine:
    """Asks the clients of a cohort one after another, in the trainer's own module.

    Args:
        loop: runs local work.
        workspace: the server's side, restored before each visit.
        layout: order of the parameters in ``x``.
        round: number of the round, for randomness and messages.
        kept_buffers: the store whose clients keep their own buffers, or None where they get the server's.
    """

    def __init__(
        self,
        loop: ClientLoop,
        workspace: Workspace,
        layout: Layout,
        round: int,
        kept_buffers: MemoryStore | None = None,
    ) -> None:
        self.loop, self.workspace, self.layout, self.round = loop, workspace, layout, round
        self.kept_buffers = kept_buffers
        self.buffers: dict[ClientId, Mapping[str, Tensor]] = {}

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any]]:
        for position, (cid, state) in enumerate(zip(cohort, states, strict=True)):
            visit = Visit(self.round, cid, position, len(cohort))
            notify(self.loop.trainer, "on_client_start", visit)
            yield self.visit(step, state, down, visit)

    def visit(self, step: Step, state: Any, down: Broadcast, visit: Visit) -> Reply[Any, Any]:
        """One client's answer, of which callbacks are told."""
        reply = self.answer(step, state, down, visit)
        notify(self.loop.trainer, "on_client_end", visit, reply)
        return reply

    def answer(self, step: Step, state: Any, down: Broadcast, visit: Visit) -> Reply[Any, Any]:
        """One client's answer; errors name it."""
        cid = visit.client
        self.workspace.reset(self._own_buffers(cid))
        with self.naming(cid):
            reply = step(state, down, self.local(visit))
        self.check(cid, reply)
        if reply.steps or cid not in self.buffers:  # a round may ask twice, once without local steps
            self.buffers[cid] = clones(buffers_of(self.workspace.module))
        return reply

    @contextmanager
    def naming(self, cid: ClientId) -> Iterator[None]:
        """Errors in here are this client's."""
        try:
            yield
        except Exception as error:
            kind = DivergenceError if isinstance(error, FloatingPointError) else ClientError
            raise kind(f"{self.where(cid)}: {type(error).__name__}: {error}{remedy_for(error)}") from error

    def local(self, visit: Visit) -> ModuleLocal:
        slope = partial(client_gradient, self.loop.trainer, self.layout, visit.client)
        again = partial(batch_gradient, self.loop.trainer, self.layout)
        return ModuleLocal(self.loop, self.layout, visit, slope, again)

    def _own_buffers(self, cid: ClientId) -> Mapping[str, Tensor] | None:
        if self.kept_buffers is None:
            return None
        return self.buffers[cid] if cid in self.buffers else self.kept_buffers[cid].buffers

    def check(self, cid: ClientId, reply: Reply[Any, Any]) -> None:
        """Refuse a model that is not finite."""
        if is_finite(reply.x_i):
            return
        lrs = [
            group.get("lr", float("nan"))
            for optimizer in self.loop.trainer.optimizers
            for group in optimizer.param_groups
        ]
        raise DivergenceError(
            f"{self.where(cid)}: training gave a model that is not finite (mean loss {reply.loss:g}, learning rate"
            f" {max(map(float, lrs), default=float('nan')):g}). The round was not committed. Lower the learning rate,"
            " clip gradients, or look at this client's data."
        )

    def where(self, cid: ClientId) -> str:
        """How messages begin."""
        return f"round {self.round}, client {cid!r}"
