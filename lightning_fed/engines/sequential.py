from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from lightning_fed.core.failures import (
    NOT_FINITE,
    RAISE,
    RAISED,
    TOO_FAR,
    TOO_SLOW,
    Failure,
    FailurePolicy,
    Fault,
    OvertimeError,
)
from lightning_fed.core.layout import Layout, is_finite
from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.problem import Solution
from lightning_fed.core.randomness import torch_generator
from lightning_fed.core.records import leaves_of
from lightning_fed.core.round import Step
from lightning_fed.engines.faults import place, spoiled
from lightning_fed.evaluation.evaluate import batch_gradient, client_gradient
from lightning_fed.local.client_loop import ClientLoop
from lightning_fed.local.server_snapshot import Left, Workspace
from lightning_fed.local.solver import ModuleLocal
from lightning_fed.trainer.data_streams import streams_of
from lightning_fed.trainer.hooks import Visit, listening, notify
from lightning_fed.trainer.log_snapshot import LogSnapshot
from lightning_fed.trainer.remedies import remedy_for

if TYPE_CHECKING:
    from lightning_fed.core.memory import Store

T = TypeVar("T")


class ClientError(RuntimeError):
    """A client's training failed; the message names round and client, the cause is chained.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 7]))})
    >>> server = FederatedServer(FedAvg())
    >>> pl.Trainer(max_epochs=1, callbacks=[server], barebones=True).fit(MLP((2, 2), log_train=False), datamodule=data)
    Traceback (most recent call last):
    lightning_fed.engines.sequential.ClientError: round 0, client 'ann': IndexError: Target 7 is out of bounds...
    """

    kind = RAISED


class DivergenceError(ClientError):
    """A client's loss, model or message is not finite.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.full((2, 2), torch.nan), torch.tensor([0, 1]))})
    >>> server = FederatedServer(FedAvg())
    >>> pl.Trainer(max_epochs=1, callbacks=[server], barebones=True).fit(MLP((2, 2), log_train=False), datamodule=data)
    Traceback (most recent call last):
    lightning_fed.engines.sequential.DivergenceError: round 0, client 'ann': ...
    """

    kind = NOT_FINITE


class DistanceError(DivergenceError):
    """A client's model is further from the server's than the policy believes.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.core import FailurePolicy
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))})
    >>> server = FederatedServer(FedAvg(), on_client_error=FailurePolicy(max_distance=1e-6))
    >>> pl.Trainer(max_epochs=1, callbacks=[server], barebones=True).fit(MLP((2, 2), log_train=False), datamodule=data)
    Traceback (most recent call last):
    lightning_fed.engines.sequential.DistanceError: round 0, client 'ann': |x_i - x_bar| is ...
    """

    kind = TOO_FAR


class TimeLimitError(ClientError):
    """A client's visit took longer than the policy allows.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.core import FailurePolicy
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))})
    >>> server = FederatedServer(FedAvg(), on_client_error=FailurePolicy(max_seconds=1e-9))
    >>> pl.Trainer(max_epochs=1, callbacks=[server], barebones=True).fit(MLP((2, 2), log_train=False), datamodule=data)
    Traceback (most recent call last):
    lightning_fed.engines.sequential.TimeLimitError: round 0, client 'ann': OvertimeError: ...
    """

    kind = TOO_SLOW


class SequentialEngine:
    """Asks the clients of a cohort one after another, in the trainer's own module.

    Args:
        loop: runs local work.
        workspace: the server's snapshot, restored before each visit.
        layout: order of the parameters in ``x``.
        round: number of the round, for randomness and messages.
        kept: the store with what clients keep to themselves, or None if clients get everything from the server.
        policy: what becomes of clients that fail.

    ``faults`` has the clients that are to fail, and how, for studies of robustness.
    ``left`` has the changes of each client's last visit with local steps, ``joined`` the entries that visits appended
    to lists of the module, in the order of the cohort.

    ``FederatedServer`` builds it. Its results are those of a stack of clients, up to rounding:

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule([TensorDataset(torch.eye(2), torch.tensor([0, 1])) for _ in range(3)])
    >>> found = []
    >>> for engine in ("sequential", "vectorized"):
    ...     model, server = MLP((2, 2), log_train=False), FederatedServer(FedAvg(), engine=engine, compile=False)
    ...     _ = torch.nn.init.eye_(model.layers[0].weight)
    ...     pl.Trainer(max_epochs=2, callbacks=[server], barebones=True).fit(model, datamodule=data)
    ...     found.append(model.layers[0].weight.detach())
    >>> torch.allclose(*found, atol=1e-6)
    True
    """

    def __init__(
        self,
        loop: ClientLoop,
        workspace: Workspace,
        layout: Layout,
        round: int,
        kept: Store | None = None,
        policy: FailurePolicy = RAISE,
    ) -> None:
        self.loop, self.workspace, self.layout, self.round = loop, workspace, layout, round
        self.kept, self.policy = kept, policy
        self.faults: Mapping[ClientId, Fault] = {}
        self.left: dict[ClientId, Left] = {}
        self.drew: ClientId | None = None  # first client whose data drew from their own random generator
        self.joined: list[Mapping[int, list[Any]]] = []

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any] | Failure]:
        """Yield the reply, or the failure, of each client of the cohort, in its order."""
        # one by one also in memory: a state is fetched when its visit begins
        for position, (cid, state) in enumerate(zip(cohort, states, strict=True)):
            yield self.visit(step, state, down, Visit(self.round, cid, position, len(cohort)))

    def visit(self, step: Step, state: Any, down: Broadcast, visit: Visit) -> Reply[Any, Any] | Failure:
        """One client's answer, of which callbacks are told; or its failure, where the round goes on without it."""
        return self.spared(visit, lambda: self._visit(step, state, down, visit))

    def spared(self, visit: Visit, attempt: Callable[[], T]) -> T | Failure:
        """What ``attempt`` gives, tried as often as the policy says; errors that the round survives are failures.

        A visit that failed leaves nothing: what it logged is taken back, and the next visit resets the module.
        """
        policy = self.policy
        if not policy.lenient:
            return attempt()
        log = LogSnapshot(self.loop.trainer, self.workspace.state.attributes.loose_metrics)
        for left in reversed(range(1 + policy.retries)):
            try:
                return attempt()
            except ClientError as error:
                log.restore()
                if left and not isinstance(error, DivergenceError):  # the same numbers would come out again
                    continue
                if not policy.skips:
                    raise
                return Failure(error.kind, str(error), visit.step, injected=self._is_injected(visit.client, error))
        raise AssertionError("unreachable")

    def _visit(self, step: Step, state: Any, down: Broadcast, visit: Visit) -> Reply[Any, Any]:
        self.prepare(visit)
        given: list[str] = []
        if listening(self.loop.trainer, "on_client_start"):
            notify(self.loop.trainer, "on_client_start", visit)
            given = self.workspace.state.attributes.changes().names  # set by a callback, so not a change of the visit
        reply = self.answer(step, state, down, visit, given)
        notify(self.loop.trainer, "on_client_end", visit, reply)
        return reply

    def prepare(self, visit: Visit) -> None:
        """Restore the module to the beginning of the round, with what the client keeps to itself."""
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
        self.check(cid, reply, left.own)
        self.take(cid, reply, left)
        if any(stream.changed() for stream in streams):
            self.drew = cid if self.drew is None else self.drew
        return reply

    def take(self, cid: ClientId, reply: Reply[Any, Any], left: Left) -> None:
        """Note the changes that a visit left."""
        if reply.steps or cid not in self.left:  # keep those of the exchange with local steps
            self.left[cid] = left
        self.joined.append(left.changes.appended)

    def forget(self) -> None:
        """Forget what visits left behind: the round is played again."""
        self.left.clear()
        self.joined.clear()

    @contextmanager
    def naming(self, cid: ClientId) -> Iterator[None]:
        """Add the round and the client's name to errors inside a with block."""
        try:
            yield
        except Exception as error:  # a user's step may raise anything; it is raised again with the client's name
            kind, remedy = ClientError, remedy_for(error)
            if isinstance(error, FloatingPointError):
                kind, remedy = DivergenceError, f" {self.policy.consequence}{remedy}"
            elif isinstance(error, OvertimeError):
                kind = TimeLimitError
            raise kind(f"{self.where(cid)}: {type(error).__name__}: {error}{remedy}") from error

    def local(self, visit: Visit) -> ModuleLocal:
        """The solver of local problems for one visit, with its gradients."""
        slope = partial(client_gradient, self.loop.trainer, self.layout, visit.client)
        again = partial(batch_gradient, self.loop.trainer, self.layout)
        if (fault := self.faults.get(visit.client)) is not None and fault.kind == TOO_SLOW:
            visit.lateness = float(fault.size or 0)
        return ModuleLocal(self.loop, self.layout, visit, slope, again, partial(self.spoiled, visit.client))

    def spoiled(self, cid: ClientId, solution: Solution) -> Solution:
        """A client's solution, as the fault that is wanted of the client leaves it."""
        if (fault := self.faults.get(cid)) is None:
            return solution
        rng = torch_generator(self.loop.work.seed, self.round, cid, "fault")
        return spoiled(solution, fault, self._x_bar, rng)

    def _is_injected(self, cid: ClientId, error: ClientError) -> bool:
        return (fault := self.faults.get(cid)) is not None and fault.kind == error.kind

    def _own_state(self, cid: ClientId) -> Mapping[str, Tensor] | None:
        if self.kept is None:
            return None
        return self.left[cid].own if cid in self.left else self.workspace.own(self.kept[cid].buffers)

    def check(self, cid: ClientId, reply: Reply[Any, Any], own: Mapping[str, Tensor] | None = None) -> None:
        """Refuse a model or a message that is not finite, and a model that is too far from the server's.

        ``own`` holds what the client keeps to itself, of which parameters must be finite, too.
        """
        personal = [t for name, t in (own or {}).items() if name in self.workspace.state.parameters]
        if is_finite(reply.x_i) and all(map(is_finite, [*leaves_of(reply.message), *personal])):
            self._check_distance(cid, reply)
            return
        lrs = [
            group.get("lr", float("nan"))
            for optimizer in self.loop.trainer.optimizers
            for group in optimizer.param_groups
        ]
        raise DivergenceError(
            f"{self.where(cid)}: training gave a model that is not finite (mean loss {reply.loss:g}, learning rate"
            f" {max(map(float, lrs), default=float('nan')):g}). {self.policy.consequence} Lower the learning rate,"
            " clip gradients, or look at this client's data."
        )

    def _check_distance(self, cid: ClientId, reply: Reply[Any, Any]) -> None:
        limit = self.policy.max_distance
        if limit is None or not reply.steps or (distance := float((reply.x_i - self._x_bar).norm())) <= limit:
            return
        raise DistanceError(
            f"{self.where(cid)}: |x_i - x_bar| is {distance:g}, the policy's max_distance is {limit:g}."
            f" {self.policy.consequence} Raise the bound, lower the learning rate, or look at this client's data."
        )

    @cached_property
    def _x_bar(self) -> Tensor:
        """The server's model at the beginning of the round."""
        return self.layout.flatten(self.workspace.state.parameters)

    def where(self, cid: ClientId) -> str:
        """The round and the client, for the beginning of messages."""
        return place(self.round, cid)
