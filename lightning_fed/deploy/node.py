"""The client's side of a real federation: follow instructions with the node's own data, module and states."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.core.failures import RAISED, Failure
from lightning_fed.core.federation import Federation
from lightning_fed.core.layout import Layout, buffers_of, parameters_of
from lightning_fed.core.memory import ClientId, Memory, tensors_of, with_tensors
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.deploy.blanks import full_schema, or_empty, parts_of, rebuilt
from lightning_fed.deploy.frames import Frame, FrameError, Schema, Spec, digest_of, schema_of
from lightning_fed.deploy.keys import Key
from lightning_fed.deploy.messages import REFUSED, ROLL, TRAIN, Answer, Instruction, Visited
from lightning_fed.deploy.remote import settings_of
from lightning_fed.deploy.versions import LostStateError, StaleError, Versions, folder_of
from lightning_fed.engines.player import RoundPlayer
from lightning_fed.engines.selection import Choice
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.lightning import pl, results_of
from lightning_fed.local.server_snapshot import Workspace, saving_the_server
from lightning_fed.server import FederatedServer
from lightning_fed.store import DamagedRecordError
from lightning_fed.trainer.hooks import RoundReport, Visit
from lightning_fed.trainer.loops import IDLE
from lightning_fed.trainer.module_state import restore_state

_log = logging.getLogger(__name__)

#: What leaves a node by default, besides messages: mean training losses. Numbers of samples go with the roll call.
SHARED = ("loss",)


class NodePlayer(RoundPlayer):
    """Visits clients of a node as a simulation would, and commits nothing."""

    def visits(
        self, instruction: Instruction, down: Broadcast, memories: Mapping[ClientId, Memory]
    ) -> tuple[dict[ClientId, Reply[Any, Any] | Failure], SequentialEngine]:
        """Each client's reply, or its failure; also after an error, the module holds the server's model."""
        federation, settings = self.federation, self.settings
        local, personal = settings.buffers == "local", federation.personal
        workspace = self.workspace = Workspace(self.trainer, self._frozen, personal, local)
        self._frozen = workspace.state.frozen
        loop: Any = self.trainer.fit_loop.epoch_loop.client_loop
        kept: Any = memories if local or personal else None
        policy = replace(settings.policy, action="skip")
        alone = SequentialEngine(loop, workspace, federation.layout, instruction.key.round, kept, policy)
        replies: dict[ClientId, Reply[Any, Any] | Failure] = {}
        try:
            with saving_the_server(self.trainer, workspace):
                for asked in instruction.clients:
                    size = int(instruction.numbers["cohort"])
                    visit = Visit(instruction.key.round, asked.client, asked.position, size)
                    state = memories[asked.client].state
                    replies[asked.client] = alone.visit(federation.algorithm.client_step, state, down, visit)
        finally:
            self._hand_back(alone, workspace.schedule, committed=False)
        return replies, alone


class NodeServer(FederatedServer):
    """Plays one instruction per fit: the round, the clock and the broadcast are the server's.

    ``instruction`` must be set before each fit; ``answered`` holds its replies afterwards.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.instruction: Instruction
        self.versions: Versions
        self.config: Mapping[str, Any] = {}
        self.answered: dict[ClientId, Reply[Any, Any] | Failure] = {}
        self.alone: SequentialEngine | None = None
        self.metrics: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.evaluate_every, self.figure, self.store = 0, False, "memory"
        super().setup(trainer, pl_module, stage)
        if stage == "fit":  # put all counters where the server's are
            position = {"rounds_done": self.rounds_done, "stage": IDLE, "metrics": {}}
            trainer.fit_loop.load_state_dict({"state_dict": {"federated": position}})

    def resume(self, trainer: pl.Trainer, loop_state: dict[str, Any] | None) -> None:
        """Do nothing: a node's states are its own store's."""

    @property
    def rounds_done(self) -> int:
        """Number of rounds that the server has committed."""
        return max(0, self.instruction.key.round)

    @property
    def local_time(self) -> int:
        """Number of optimiser steps before this round, as the server counts them."""
        return int(self.instruction.numbers["local_time"])

    def most_batches(self, trainer: pl.Trainer) -> int:
        """Number of batches of the longest visit of any client of the federation."""
        return int(self.instruction.numbers["batches"])

    def _planned_lr_sum(self, trainer: pl.Trainer, examples: Mapping[ClientId, int]) -> float:
        return self.instruction.numbers["lr_sum"]

    def begin_round(self, trainer: pl.Trainer) -> list[ClientId]:
        federation, instruction = self.federation or self._begin(trainer), self.instruction
        if instruction.x0 is not None:
            federation.x0 = instruction.x0.to(federation.x0)
        if (x_bar := instruction.down.tensors["x_bar"]).numel():  # empty where the clients need none
            federation.server = with_tensors(federation.server, {**tensors_of(federation.server), "x_bar": x_bar})
        federation.rounds_done, federation.local_time = instruction.key.round, self.local_time
        module = trainer.lightning_module
        restore_state(module, {**buffers_of(module), **instruction.buffers})
        federation.moving |= instruction.buffers.keys() & federation.parameters.keys()
        self._show_server()
        federation.take_state(module)
        return [asked.client for asked in instruction.clients]

    def run_round(self, trainer: pl.Trainer, cohort: list[ClientId]) -> RoundReport:
        federation, instruction, player = self.federation, self.instruction, self._player
        assert federation is not None
        assert isinstance(player, NodePlayer)
        blank = self.blank_broadcast(federation.algorithm, federation.x0)
        down = rebuilt(blank, instruction.down.tensors, instruction.down.plain)
        memories = {asked.client: self._memory_of(asked.client, asked.base) for asked in instruction.clients}
        self.answered, self.alone = player.visits(instruction, down, memories)
        losses = {cid: reply.loss for cid, reply in self.answered.items() if isinstance(reply, Reply)}
        self.report = RoundReport(instruction.key.round, cohort, losses, {})
        found = results_of(trainer).metrics(on_step=False)["callback"]
        self.metrics = {name: float(value) for name, value in found.items() if value.numel() == 1}
        return self.report

    def blank_broadcast(self, algorithm: Algorithm[Any, Any, Any], x0: Tensor) -> Broadcast:
        """A broadcast as the server sends it, filled with numbers that mean nothing."""
        return algorithm.broadcast(algorithm.init_server(x0), replace(self.local_work, lr_sum=1.0))

    def _memory_of(self, cid: ClientId, base: Key) -> Memory:
        return self.versions.get(cid, base)

    def _begin(self, trainer: pl.Trainer, saved: dict[str, Any] | None = None) -> Federation:
        federation = super()._begin(trainer, saved)
        choice = Choice("sequential", False, 1)
        self._player = NodePlayer(trainer, federation, self._round_settings(), choice)
        return federation

    def _touched(self, trainer: pl.Trainer) -> str | None:
        return None if self.federation is None else super()._touched(trainer)

    def _tell_plan(self, trainer: pl.Trainer) -> None:
        """Say nothing: the server does."""


class Node:
    """A node: its own clients' data, its module, and a folder for what its clients remember.

    Args:
        trainer: makes fits of one round each.
        module: the model.
        data: holds the node's own clients, and perhaps others that are never visited.
        server: plays instructions.
        clients: ids of the node's clients.
        folder: keeps clients' states, by run.
        share: names of the metrics that may leave the node: ``loss`` and whatever the module logs in training.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        data: FederatedDataModule,
        server: NodeServer,
        clients: Sequence[ClientId],
        folder: Path,
        share: Sequence[str] = SHARED,
    ) -> None:
        self.trainer, self.module, self.data, self.server = trainer, module, data, server
        self.clients, self.folder, self.share = list(clients), folder, tuple(share)
        self.settings = settings_of(server, Layout.of(module, server.personal), server.config)
        self._run = ""
        self._versions: Versions | None = None
        unknown = [cid for cid in clients if cid not in data.client_ids]
        if unknown:
            raise ValueError(f"The data have no client {unknown[0]!r}. There are {data.client_ids[:5]} and so on.")

    def follow(self, data: bytes) -> bytes:
        """The answer to an instruction, both as frames; the new states are on disk before it is given."""
        of = digest_of(data)
        frame = Frame.open(data)
        run, key = str(frame.header.get("run")), Key.read(frame.header.get("key"))
        try:
            answer = self._follow(frame, run, key, of)
        except (FrameError, StaleError, LostStateError, SettingsError) as error:
            _log.warning("Instruction %s is refused: %s", key, error)
            return Answer(run, key, REFUSED, of, reason=str(error)).encode()
        except DamagedRecordError as error:
            _log.error("Instruction %s is refused: %s", key, error)
            reason = "A record of what its clients remember is damaged; its log says which. Begin a new run."
            return Answer(run, key, REFUSED, of, reason=reason).encode()
        except Exception as error:  # a user's module may raise anything; the text stays on the node
            failed = [Visited(cid, failure=str(RAISED)) for cid in self._named(frame)]
            raise BrokenError(Answer(run, key, str(frame.header.get("kind")), of, failed).encode()) from error
        return answer.encode()

    @staticmethod
    def _named(frame: Frame) -> list[ClientId]:
        return [asked[0] for asked in frame.header["clients"]]

    def _follow(self, frame: Frame, run: str, key: Key, of: str) -> Answer:
        kind = frame.header.get("kind")
        self._check_settings(frame.header.get("settings"))
        if kind == ROLL:
            asked = Instruction.read(frame, {}).clients
            self._check_clients([own.client for own in asked])
            visited = [Visited(own.client, numbers={"examples": self.data.num_examples(own.client)}) for own in asked]
            return Answer(run, key, ROLL, of, visited)
        if kind != TRAIN:
            raise FrameError(f"There are no instructions of kind {kind!r}; there are {ROLL} and {TRAIN}.")
        instruction = Instruction.read(frame, or_empty(self._schema(frame.schema), frame.schema))
        self._check_clients([own.client for own in instruction.clients])
        return self._train(instruction, of)

    def _check_settings(self, theirs: Any) -> None:
        if not isinstance(theirs, dict):
            raise FrameError("The instruction names no settings.")
        for name in {**self.settings, **theirs}:
            own, other = self.settings.get(name), theirs.get(name)
            if own != other:
                raise SettingsError(
                    f"{name} is {own!r} on this node, and {other!r} on the server. Use the same config."
                )

    def _check_clients(self, asked: Sequence[ClientId]) -> None:
        strange = [cid for cid in asked if cid not in self.clients]
        if strange:
            raise SettingsError(f"Client {strange[0]!r} is not one of this node's: {self.clients[:5]}.")

    def _schema(self, declared: Schema) -> Schema:
        """What an instruction may contain, from the node's own module and algorithm; frozen parameters if they move."""
        layout = Layout.of(self.module, self.server.personal)
        x0 = layout.flatten(parameters_of(self.module))
        algorithm = self.server.algorithm.planned(1.0).bind(layout)
        down = full_schema(self.server.blank_broadcast(algorithm, x0), x0)
        frozen = {name: p for name, p in parameters_of(self.module).items() if f"buffers/{name}" in declared}
        frozen = {name: p for name, p in frozen.items() if name not in layout.names}
        rest = self.server.personal.rest({**buffers_of(self.module), **frozen})
        expected: dict[str, Spec] = {f"down/{name}": spec for name, spec in down.items()}
        expected["x0"] = Spec.of(x0)
        return {**expected, **{f"buffers/{name}": spec for name, spec in schema_of(rest).items()}}

    def _train(self, instruction: Instruction, of: str) -> Answer:
        versions, key = self._open(instruction.run), instruction.key
        versions.begin(key)
        versions.settle({asked.client: (asked.base, asked.committed) for asked in instruction.clients})
        server, trainer = self.server, self.trainer
        server.instruction, server.versions = instruction, versions
        trainer.fit_loop.max_epochs = server.rounds_done + 1
        trainer.should_stop = False
        trainer.fit(self.module, datamodule=self.data)
        new, visited = {}, []
        for asked in instruction.clients:
            reply = server.answered[asked.client]
            if isinstance(reply, Failure):
                _log.warning("Client %r failed: %s", asked.client, reply.reason)  # the reason stays on the node
                visited.append(Visited(asked.client, failure=str(reply.kind)))
                continue
            assert server.alone is not None
            left = server.alone.left[asked.client]
            visits = versions.get(asked.client, asked.base).visits + 1
            new[asked.client] = Memory(reply.state, visits, left.own)
            numbers: dict[str, float] = {"steps": reply.steps, "gradients": reply.gradients}
            numbers |= {"optimizer_steps": left.steps, "arrived": reply.arrived}
            if reply.bytes_up is not None:
                numbers["bytes_up"] = reply.bytes_up
            if "loss" in self.share:
                numbers["loss"] = reply.loss
            shared = left.shared if server.buffers == "average" else {}
            message, plain = parts_of(reply.message)
            visited.append(Visited(asked.client, None, numbers, plain, message, shared))
        versions.keep(key, new)
        metrics = {name: value for name, value in server.metrics.items() if name in self.share and name != "loss"}
        return Answer(instruction.run, key, TRAIN, of, visited, metrics)

    def _open(self, run: str) -> Versions:
        if self._versions is None or self._run != run:
            self.close()
            self._versions, self._run = Versions(folder_of(self.folder, run), self._fresh), run
        return self._versions

    def _fresh(self) -> Any:
        federation = self.server.federation
        if federation is not None:
            return federation.fresh()
        layout = Layout.of(self.module, self.server.personal)
        return self.server.algorithm.planned(1.0).bind(layout).init_client(layout.flatten(parameters_of(self.module)))

    def close(self) -> None:
        """Release the folder."""
        if self._versions is not None:
            self._versions.close()
            self._versions = None


class BrokenError(Exception):
    """A node's own code has failed outside of its clients' steps, so that the process must be started anew.

    ``answer`` tells the server that the clients failed, and never why: the error may hold data.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        super().__init__("The node's own code has failed.")


class SettingsError(ValueError):
    """An instruction does not fit the node's own config."""
