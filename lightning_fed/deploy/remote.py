"""The server of a real federation: clients, their data and their states are elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.algorithm import hyper_parameters
from lightning_fed.core.failures import NOT_FINITE, RAISED, TOO_SLOW, Failure
from lightning_fed.core.federation import Federation
from lightning_fed.core.layout import Layout, is_finite
from lightning_fed.core.memory import ClientId, Memory, with_tensors
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.records import leaves_of
from lightning_fed.core.round import Engine, Step
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.deploy.blanks import blank_message, parts_of, rebuilt
from lightning_fed.deploy.frames import FrameError, Spec, schema_of
from lightning_fed.deploy.keys import NONE, Key, Version
from lightning_fed.deploy.link import Link
from lightning_fed.deploy.messages import ROLL, TRAIN, Asked, Envelope, Instruction, Parts, Visited
from lightning_fed.engines.selection import Choice, Setting
from lightning_fed.engines.sequential import ClientError, DivergenceError, SequentialEngine, TimeLimitError
from lightning_fed.lightning import pl
from lightning_fed.local.server_snapshot import Left
from lightning_fed.server import FederatedServer
from lightning_fed.trainer.module_state import Changes


class RemoteData(FederatedDataModule):
    """The clients of a real federation as the server knows them: ids and numbers of samples, no data.

    >>> data = RemoteData({"ann": 3, "bob": 5}, batch_size=2)
    >>> data.client_ids, data.num_examples("bob"), data.has_split("test")
    (['ann', 'bob'], 5, False)
    """

    def __init__(self, examples: Mapping[ClientId, int], batch_size: int = 1, drop_last: bool = False) -> None:
        super().__init__(batch_size=batch_size, drop_last=drop_last)
        self._examples = dict(examples)

    @property
    def client_ids(self) -> list[ClientId]:
        """All clients, in the order in which cohorts are drawn."""
        return list(self._examples)

    def num_examples(self, cid: ClientId) -> int:
        """Number of training samples that the client's node has reported."""
        return self._examples[cid]

    def has_split(self, split: str) -> bool:
        """False: the server has no data."""
        return False

    def batches_dataloader(
        self, cid: ClientId, batches: Sequence[Tensor], generator: torch.Generator | None = None
    ) -> Any:
        """Nothing: the server only counts batches."""
        return []


class RemoteFederation(Federation):
    """A federation whose server keeps the names of clients' states, not the states."""

    def fresh(self) -> Version:
        """The name of a state of round 0."""
        return Version.of(NONE)

    def build(self, tensors: Mapping[str, Tensor], layout: int) -> Version:
        """A name from a checkpoint."""
        found: Version = with_tensors(Version.of(NONE), tensors)
        return found

    def adapt(self, memory: Memory) -> Memory:
        """The memory as it is: a name has no layout."""
        return memory

    def follow(self, module: Any) -> None:
        """Refuse parameters that were frozen or unfrozen: nodes have the layout of round 0."""
        if Layout.of(module, self.personal) != self.layout:
            raise ValueError(
                "The set of trained parameters has changed. In a real federation it stays that of round 0: nodes would"
                " not know of the change. Freeze parameters before the run, or simulate with lightning-fed fit."
            )

    def _revise(self, cid: ClientId, weight: float) -> None:
        if len(self.store) and self.algorithm.share(self.algorithm.init_client(self.x0)) is not None:
            raise ValueError(
                f"Client {cid!r} cannot leave or join in the middle of a run of {type(self.algorithm).__name__}: the"
                " server has a mean over clients' states, and the states are on their nodes. Begin a new run from the"
                " server's model."
            )
        self.stationarity = None


def settings_of(server: FederatedServer, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that server and nodes must have in common, in plain values; ``config`` are further ones by name."""
    tolerance = None if server.local_tolerance is None else repr(server.local_tolerance)
    known = {"algorithm": _plain(hyper_parameters(server.algorithm)), "seed": server.seed, "buffers": server.buffers}
    known |= {"local_steps": server.local_steps, "local_epochs": server.local_epochs, "local_tolerance": tolerance}
    known |= {"personal": list(server.personal.patterns), "parameters": [list(layout.names), int(layout.numel)]}
    return {**known, **_plain(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(own) for own in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


class RemoteEngine:
    """Asks the clients of a cohort on their nodes.

    Replies come in the order of the cohort, so that their sum has the bits of a simulation.

    Args:
        alone: notes what visits leave; it visits nobody.
        server: the callback, for its settings and its federation.
        link: asks nodes.
    """

    def __init__(self, alone: SequentialEngine, server: DeployedServer, link: Link) -> None:
        self.alone, self.server, self.link = alone, server, link
        federation = server.federation
        assert federation is not None
        self.federation = federation
        self.buffers = federation.personal.rest(federation.buffers)
        self.settings = settings_of(server, federation.layout, server.config)
        self._exchange = -1

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any] | Failure]:
        """Yield the reply, or the failure, of each client of the cohort, in its order."""
        self._exchange += 1
        asked = {
            cid: Asked(cid, state.name, self._committed(cid), position)
            for position, (cid, state) in enumerate(zip(cohort, states, strict=True))
        }
        fields, plain = parts_of(down)
        plan = self.federation.lr_sum
        blank = blank_message(self.federation.algorithm, self.federation.x0, down, plan if plan > 0 else 1.0)

        def write(node: int, clients: Sequence[ClientId], key: Key) -> Instruction:
            own = [asked[cid] for cid in clients]
            x0 = self.federation.x0.cpu() if any(each.base == NONE for each in own) else None
            numbers = self._numbers(len(cohort))
            envelope = Envelope(self.link.run, key, TRAIN)
            return Instruction(envelope, self.settings, own, numbers, Parts(fields, plain), x0, self.buffers)

        turn = self.alone.round, self._exchange
        answers = self.link.ask(cohort, turn, write, schema_of(parts_of(blank)[0]), self._shared_schema())
        visited: dict[ClientId, tuple[Key, Visited]] = {}
        for key, answer in answers.values():
            visited |= {own.client: (key, own) for own in answer.visited}
            self.server.note_shared(answer.metrics, [own.client for own in answer.visited])
        for cid in cohort:
            yield self._reply(cid, blank, *visited[cid]) if cid in visited else self._missing(cid)

    def _shared_schema(self) -> dict[str, Spec]:
        """Buffers, and frozen parameters, that a visit may have changed."""
        if self.server.buffers == "local":
            return {}
        parameters = self.alone.workspace.state.parameters
        frozen = {name: t for name, t in parameters.items() if name not in self.federation.layout.names}
        return schema_of(self.federation.personal.rest({**frozen, **self.alone.workspace.buffers}))

    def _committed(self, cid: ClientId) -> Key:
        memory = self.federation.store.get(cid)
        return NONE if memory is None else memory.state.name

    def _numbers(self, cohort: int) -> dict[str, float]:
        clock = self.alone.loop.trainer.fit_loop.clock
        time, plan = self.federation.local_time, self.federation.lr_sum
        return {"cohort": cohort, "local_time": time, "batches": clock.batches, "lr_sum": plan}

    def _reply(self, cid: ClientId, blank: Any, key: Key, own: Visited) -> Reply[Any, Any] | Failure:
        where = self.alone.where(cid)
        if own.failure is not None:
            return self._failed(cid, own.failure, f"{where}: its node reports that the visit failed ({own.failure}).")
        try:
            message = rebuilt(blank, own.message, own.plain)
        except FrameError as error:
            return self._failed(cid, RAISED, f"{where}: {error}")
        if not all(map(is_finite, leaves_of(message))):
            return self._failed(cid, NOT_FINITE, f"{where}: its message is not finite.")
        numbers = own.numbers
        steps, sent = int(numbers.get("steps", 0)), numbers.get("bytes_up")
        unknown = torch.full((), torch.nan, dtype=self.federation.x0.dtype).expand(self.federation.x0.shape)
        reply: Reply[Any, Any] = Reply(
            Version.of(key),
            message,
            unknown,  # a client's model does not leave its node
            numbers.get("loss", float("nan")),
            steps,
            None if sent is None else int(sent),
            bool(numbers.get("arrived", 1)),
            gradients=int(numbers.get("gradients", 0)),
        )
        schedule, taken = self.alone.workspace.schedule, int(numbers.get("optimizer_steps", 0))
        self.alone.take(cid, reply, Left(own.shared, {}, Changes({}, []), schedule, steps, taken))
        return reply

    def _missing(self, cid: ClientId) -> Failure:
        node, limit = self.link.owners[cid], self.link.patience.total
        reason = f"{self.alone.where(cid)}: node {node} has not answered in {limit:g} s."
        return self._failed(cid, TOO_SLOW, f"{reason} Look at its logs, or raise the patience.")

    def _failed(self, cid: ClientId, kind: str, reason: str) -> Failure:
        policy = self.alone.policy
        if policy.skips:
            return Failure(kind, reason)
        known: dict[str, type[ClientError]] = {NOT_FINITE: DivergenceError, TOO_SLOW: TimeLimitError}
        raise known.get(kind, ClientError)(f"{reason} {policy.consequence}")


class _Remote(Choice):
    """Has all clients asked on their nodes."""

    def __init__(self, server: DeployedServer) -> None:
        super().__init__("sequential", False, 1)
        self._server = server

    def engine(self, alone: SequentialEngine, setting: Setting, cohort: Sequence[ClientId]) -> Engine:
        """Return the engine of a round."""
        return RemoteEngine(alone, self._server, self._server.link) if cohort else alone


class DeployedServer(FederatedServer):
    """The server of a real federation, in a Trainer without data: a FederatedServer that asks nodes.

    ``link`` must be set before the fit; ``config`` has settings, besides its own, that nodes must share. Takes the
    arguments of :class:`~lightning_fed.FederatedServer`; those about engines mean nothing here, because every node
    trains its clients one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.link: Link
        self.config: Mapping[str, Any] = {}
        self.shared: dict[str, list[tuple[float, float]]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.evaluate_every, self.figure, self.store = 0, False, "memory"  # the server has no data and no states
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.lr_scheduler_configs:
            raise ValueError(
                "Learning rate schedulers are not carried to nodes, which would train with other rates. Return the"
                " optimiser alone from configure_optimizers, or simulate with lightning-fed fit."
            )

    def note_shared(self, metrics: Mapping[str, float], clients: Sequence[ClientId]) -> None:
        """Keep metrics that a node shares, weighted by the samples of the clients that it visited."""
        assert self.federation is not None
        weight = float(sum(self.federation.examples[cid] for cid in clients))
        for name, value in metrics.items():
            self.shared.setdefault(name, []).append((weight, value))

    def run_round(self, trainer: pl.Trainer, cohort: list[ClientId]) -> Any:
        self.shared.clear()
        report = super().run_round(trainer, cohort)
        for name, entries in self.shared.items():
            report.metrics[f"clients/{name}"] = sum(w * v for w, v in entries) / sum(w for w, _ in entries)
        return report

    def _found(self, examples: Mapping[ClientId, int], module: pl.LightningModule, lr_sum: float) -> Federation:
        return RemoteFederation(self.algorithm, examples, module, lr_sum, self.personal)

    def _engines(self) -> Choice:
        return _Remote(self)


def call_roll(link: Link, settings: Mapping[str, Any], clients: Sequence[ClientId]) -> dict[ClientId, int]:
    """Numbers of samples of all registered clients, by their nodes' own word; waits until every node has answered."""

    def write(node: int, own: Sequence[ClientId], key: Key) -> Instruction:
        return Instruction(Envelope(link.run, key, ROLL), settings, [Asked(cid, NONE, NONE, 0) for cid in own])

    answers = link.ask(clients, (-1, 0), write, {}, {})
    found = {own.client: own for _, answer in answers.values() for own in answer.visited}
    if missing := [cid for cid in clients if cid not in found]:
        raise ClientError(
            f"No node has answered the roll call for client {missing[0]!r} ({len(missing)} such clients) in"
            f" {link.patience.total:g} s. Start its node, or leave the client out of the server's list."
        )
    if empty := [cid for cid in clients if not found[cid].numbers.get("examples")]:
        raise ClientError(f"The node of client {empty[0]!r} reports no samples of it. Look at the node's log and data.")
    return {cid: int(found[cid].numbers["examples"]) for cid in clients}
