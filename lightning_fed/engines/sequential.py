from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_fed.core.layout import Layout, is_finite
from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.round import Step
from lightning_fed.evaluation.evaluate import batch_gradient, client_gradient
from lightning_fed.local.client_loop import ClientLoop
from lightning_fed.local.server_snapshot import Left, Workspace
from lightning_fed.local.solver import ModuleLocal
from lightning_fed.trainer.data_streams import streams_of
from lightning_fed.trainer.hooks import Visit, listening, notify
from lightning_fed.trainer.remedies import remedy_for

if TYPE_CHECKING:
    from lightning_fed.core.memory import Store


class ClientError(RuntimeError):
    """A client's training failed; the message names round and client, the cause is chained."""


class DivergenceError(ClientError):
    """A client's loss or model is not finite."""


class SequentialEngine:
    """Asks the clients of a cohort one after another, in the trainer's own module.

    Args:
        loop: runs local work.
        workspace: the server's snapshot, restored before each visit.
        layout: order of the parameters in ``x``.
        round: number of the round, for randomness and messages.
        kept: the store with the clients' own buffers, or None if clients get the server's buffers.

    ``left`` has the changes of each client's last visit with local steps, ``joined`` the entries that visits appended
    to lists of the module, in the order of the cohort.
    """

    def __init__(
        self,
        loop: ClientLoop,
        workspace: Workspace,
        layout: Layout,
        round: int,
        kept: Store | None = None,
    ) -> None:
        self.loop, self.workspace, self.layout, self.round = loop, workspace, layout, round
        self.kept = kept
        self.left: dict[ClientId, Left] = {}
        self.drew: ClientId | None = None  # first client whose data drew from their own random generator
        self.joined: list[Mapping[int, list[Any]]] = []

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any]]:
        # states is lazy: fetching a state when its visit begins keeps one state in memory at a time
        for position, (cid, state) in enumerate(zip(cohort, states, strict=True)):
            yield self.visit(step, state, down, Visit(self.round, cid, position, len(cohort)))

    def visit(self, step: Step, state: Any, down: Broadcast, visit: Visit) -> Reply[Any, Any]:
        """Return one client's reply, and notify callbacks."""
        self.prepare(visit)
        given: list[str] = []
        if listening(self.loop.trainer, "on_client_start"):
            notify(self.loop.trainer, "on_client_start", visit)
            given = self.workspace.state.attributes.changes().names  # set by a callback, so not a change of the visit
        reply = self.answer(step, state, down, visit, given)
        notify(self.loop.trainer, "on_client_end", visit, reply)
        return reply

    def prepare(self, visit: Visit) -> None:
        """Restore the module to the beginning of the round, with the client's own buffers if it has any."""
        self.workspace.reset(self._own_state(visit.client))

    def answer(
        self, step: Step, state: Any, down: Broadcast, visit: Visit, given: Sequence[str] = ()
    ) -> Reply[Any, Any]:
        """Return one client's reply; errors name the client. ``given`` are attributes that a callback set."""
        data: Any = self.loop.trainer.datamodule  # type: ignore[attr-defined]
        cid, streams = visit.client, streams_of(data, visit.client)
        with self.naming(cid):
            reply = step(state, down, self.local(visit))
            left = self.workspace.left(visit.step, visit.optimizer_steps, given)
        self.check(cid, reply)
        self.take(cid, reply, left)
        if any(stream.changed() for stream in streams):
            self.drew = cid if self.drew is None else self.drew
        return reply

    def take(self, cid: ClientId, reply: Reply[Any, Any], left: Left) -> None:
        """Note the changes that a visit left."""
        if reply.steps or cid not in self.left:  # keep those of the exchange with local steps
            self.left[cid] = left
        self.joined.append(left.changes.appended)

    @contextmanager
    def naming(self, cid: ClientId) -> Iterator[None]:
        """Add the round and the client's name to errors inside a with block."""
        try:
            yield
        except Exception as error:  # a user's step may raise any error; it is raised again with the client's name
            kind = DivergenceError if isinstance(error, FloatingPointError) else ClientError
            raise kind(f"{self.where(cid)}: {type(error).__name__}: {error}{remedy_for(error)}") from error

    def local(self, visit: Visit) -> ModuleLocal:
        slope = partial(client_gradient, self.loop.trainer, self.layout, visit.client)
        again = partial(batch_gradient, self.loop.trainer, self.layout)
        return ModuleLocal(self.loop, self.layout, visit, slope, again)

    def _own_state(self, cid: ClientId) -> Mapping[str, Tensor] | None:
        if self.kept is None:
            return None
        return self.left[cid].state if cid in self.left else self.kept[cid].buffers

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
        """The round and the client, for the beginning of messages."""
        return f"round {self.round}, client {cid!r}"
