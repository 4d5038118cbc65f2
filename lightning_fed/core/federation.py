"""The state of a running federation: server, clients, rounds done. Knows nothing of Lightning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fed.core.algorithm import Algorithm, hyper_parameters, tree_map, wide
from lightning_fed.core.commit import Commit, StoreAhead
from lightning_fed.core.layout import Layout, buffers_of, clones, parameters_of
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import (
    ClientId,
    Cost,
    Deferred,
    Memory,
    MemoryStore,
    Store,
    Summary,
    tensors_of,
    with_tensors,
)
from lightning_fed.core.messages import Broadcast, Replies, Reply
from lightning_fed.core.personal import Personal
from lightning_fed.core.round import Engine, Outcome, Sharing, Step, run_round

#: Of what a checkpoint says about a federation.
FORMAT = 2
#: Gives the buffers that a client keeps to itself after its visit.
Kept = Callable[[ClientId], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class _Staging:
    """Asks an engine, and has the store write what a client will remember while the next one trains."""

    engine: Engine
    store: Store
    round: int
    layout: int
    kept: Kept | None

    def ask(self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]) -> Iterator[Any]:
        answered = iter(cohort)
        for reply in self.engine.ask(step, states, down, cohort):
            if isinstance(reply, Replies):  # of a stack, whose states are small, and rows of one tensor
                for _ in reply.states:
                    next(answered)
            else:
                cid = next(answered)
                if isinstance(reply, Reply):
                    self.stage(cid, reply)
            yield reply

    def stage(self, cid: ClientId, reply: Reply[Any, Any]) -> None:
        if reply.arrived and reply.x_i.device.type == "cpu":  # else the commit copies states from the device
            own = {} if self.kept is None else self.kept(cid)
            self.store.stage(cid, Memory(reply.state, buffers=own, layout=self.layout), self.round)


class Federation:
    """Algorithm, population and everything they remember; a round is played, then committed as a whole.

    Args:
        algorithm: the algorithm.
        examples: number of training samples of every client, by client id.
        module: the model as it is before the first round.
        lr_sum: planned sum of the step sizes of a visit before round 0, where the algorithm's settings depend on it.
        personal: the parameters and buffers that every client keeps to itself, beginning with those of ``module``.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any, Any],
        examples: Mapping[ClientId, int],
        module: nn.Module,
        lr_sum: float = float("nan"),
        personal: Personal = Personal(),  # noqa: B008  # frozen
    ) -> None:
        self.lr_sum = lr_sum
        algorithm = algorithm.planned(lr_sum)
        self.personal = personal
        self.layouts = [Layout.of(module, personal)]  # every layout since round 0; the last one is current
        self.first = clones(personal.part_of(module))  # the personal part of clients that have not been visited
        self.played: Mapping[ClientId, Mapping[str, Tensor]] = {}  # personal parts of a round that is not committed yet
        self.examples = dict(examples)
        self.weights = {cid: algorithm.weight(count) for cid, count in examples.items()}
        self.algorithm = algorithm.bind(self.layout)
        self.parameters = {name: (tuple(p.shape), p.dtype) for name, p in parameters_of(module).items()}
        self.x0 = self.layout.flatten(parameters_of(module))
        self.server = self.algorithm.init_server(self.x0)
        self.store: Store = MemoryStore(self.fresh, self.adapt, self.build)
        self.buffers = clones(buffers_of(module))
        self.moving: set[str] = set()  # names of frozen parameters that nevertheless changed in a round
        self.rounds_done = -1 if algorithm.traits.full_start else 0
        self.local_time = 0  # steps of the optimiser that one client would have taken, had it taken part in every round
        self.cost = Cost()
        self.stationarity: tuple[int, float] | None = None  # rounds done, and the stationarity measured then
        self._pending: Commit | None = None
        self.expelled: list[ClientId] = []  # who have left for good, whatever the data hold

    @property
    def layout(self) -> Layout:
        """Where each trained parameter lies in ``x``."""
        return self.layouts[-1]

    def fresh(self) -> Any:
        """The state of a client in round 0."""
        return self.algorithm.init_client(self.x0)

    @property
    def client_ids(self) -> list[ClientId]:
        return list(self.weights)

    @property
    def bytes_down(self) -> int:
        return self.cost.bytes_down

    @property
    def bytes_up(self) -> int:
        return self.cost.bytes_up

    @property
    def started(self) -> bool:
        """False while an algorithm with a full start still has to ask every client once."""
        return self.rounds_done >= 0

    def follow(self, module: nn.Module) -> None:
        """Update the layout if parameters were frozen or unfrozen since the last round.

        A parameter that becomes trainable joins with the state of round 0: the value that it has in the module, where
        it has been frozen so far, and no dual. Clients' memories follow when they are read.
        """
        layout = Layout.of(module, self.personal)
        if layout == self.layout:
            return
        old, first = self.layout, {**parameters_of(module), **self.layout.split(self.x0)}
        self.layouts.append(layout)
        self.algorithm = self.algorithm.bind(layout)
        self.moving.difference_update(layout.names)
        self.x0 = layout.flatten(first)
        self.server = layout.transplant(old, self.server, self.algorithm.init_server(self.x0))

    def adapt(self, memory: Memory) -> Memory:
        """A memory in the present layout; parameters that were not trained all the time since have that of round 0."""
        now = len(self.layouts) - 1
        if memory.layout == now:
            return memory
        old, between = self.layouts[memory.layout], self.layouts[memory.layout + 1 : now]
        here = tree_map(lambda t: t.to(self.x0.device), memory.state)
        state = self.layout.transplant(old, here, self.fresh(), between)
        return replace(memory, state=tree_map(Tensor.cpu, state), layout=now)

    def build(self, tensors: Mapping[str, Tensor], layout: int) -> Any:
        """A state in the layout that it was saved in, on the CPU."""
        x = torch.zeros(self.layouts[layout].numel, dtype=self.x0.dtype)
        return with_tensors(self.algorithm.init_client(x), tensors)

    def take_state(self, module: nn.Module) -> None:
        """Copy the module's buffers, and frozen parameters that change, as they are before a round."""
        parameters = parameters_of(module)
        moving = {name: parameters[name] for name in self.moving if name in parameters}
        self.buffers = clones({**buffers_of(module), **moving})

    def part_of(self, cid: ClientId) -> dict[str, Tensor]:
        """A client's personal part by name: as it was after its last visit, or else the first model's."""
        if not self.first:
            return {}
        if (own := self.played.get(cid)) is None:
            memory = self.store.get(cid)
            own = {} if memory is None else memory.buffers
        return {**self.first, **{name: t.to(self.x0.device) for name, t in self.personal.part(own).items()}}

    def play(self, cohort: Sequence[ClientId], engine: Engine, work: LocalWork, kept: Kept | None = None) -> Outcome:
        """Run a round, in which clients do ``work``, without moving anything.

        ``kept`` gives the buffers that a client keeps to itself after its visit.
        """
        exchanges = None if self.started else 1
        staging = _Staging(engine, self.store, self.rounds_done + 1, len(self.layouts) - 1, kept)
        if isinstance(engine, Sharing):
            self.store.prefetch(engine.share(cohort))
            engine.stage = staging.stage
        else:
            self.store.prefetch(cohort)
            engine = staging
        fresh = self.fresh()  # one for all: states are never changed in place
        recall = partial(self.recall, fresh=fresh)
        broadcast = partial(self.algorithm.broadcast, work=work)
        return run_round(self.algorithm, self.server, cohort, engine, recall, self.weights, broadcast, exchanges)

    def recall(self, cid: ClientId, fresh: Any = None) -> Any:
        """A client's state, on the device of the model; for a client without a memory ``fresh``, or a new one."""
        found = self.store.get(cid)
        if found is None:
            return self.fresh() if fresh is None else fresh
        return found.state if self._here else tree_map(lambda t: t.to(self.x0.device), found.state)

    @property
    def _here(self) -> bool:
        """Whether the model is on the CPU, where memories are kept."""
        return self.x0.device.type == "cpu"

    def prepare(
        self,
        outcome: Outcome,
        buffers: Mapping[str, Tensor] | None = None,
        kept: Mapping[ClientId, Mapping[str, Tensor]] | None = None,
        steps: int = 0,
    ) -> Commit:
        """What :meth:`apply` will replace.

        Args:
            buffers: the server's new buffers, and frozen parameters that changed.
            kept: by client, the buffers and parameters that the client keeps to itself.
            steps: by how much the local time advances.
        """
        memories, layout = {}, len(self.layouts) - 1
        for cid, state in outcome.states.items():
            visits, spent, *_ = self.store.summary(cid) or Summary(0, Cost())
            there = state if self._here or isinstance(state, Deferred) else tree_map(Tensor.cpu, state)
            own = (kept or {}).get(cid, {})
            own = own if self._here else {name: t.cpu() for name, t in own.items()}
            memories[cid] = Memory(there, visits + 1, own, spent + outcome.costs[cid], layout)
        for cid in outcome.costs.keys() - outcome.states.keys():  # what was lost on the way has cost something too
            memories[cid] = replace(self.store[cid], cost=self.store[cid].cost + outcome.costs[cid], layout=layout)
        return Commit(
            outcome.server,
            memories,
            dict(self.buffers if buffers is None else buffers),
            self.rounds_done + 1,
            self.local_time + steps,
            self.cost + outcome.cost,
        )

    def after(self, commit: Commit) -> Federation:
        """The federation as it will be after a commit, for reading only."""
        ahead = copy.copy(self)
        ahead.store = cast(Store, StoreAhead(self.store, commit.memories))  # it refuses to be written to
        ahead.server, ahead.buffers, ahead.cost = commit.server, commit.buffers, commit.cost
        ahead.rounds_done, ahead.local_time = commit.rounds_done, commit.local_time
        return ahead

    def apply(self, commit: Commit) -> None:
        """Replace the states of server and clients together."""
        self._pending = commit
        self.settle()

    def commit(self, outcome: Outcome) -> None:
        """Commit a round without buffers."""
        self.apply(self.prepare(outcome))

    def settle(self) -> None:
        """Finish a commit that was interrupted; does nothing if there is none."""
        if (done := self._pending) is None:
            return
        self.store.commit(done.rounds_done, done.memories)
        self.server, self.buffers = done.server, done.buffers
        self.moving |= done.buffers.keys() & self.parameters.keys()
        self.rounds_done = done.rounds_done
        self.local_time = done.local_time
        self.cost = done.cost
        self._pending = None

    def expel(self, cid: ClientId) -> None:
        """Take a client out of the federation, and its share out of what the server remembers.

        A mean m over clients of weight W becomes (W m - w_i s_i) / (W - w_i), as if the client had never been there.
        Its memory stays in the store, for the day when it is admitted again.
        """
        if cid not in self.weights:
            raise ValueError(f"Client {cid!r} is not in the federation of {len(self.weights)} clients.")
        if len(self.weights) == 1:
            raise ValueError(f"Client {cid!r} is the only one left; a federation needs a client.")
        self._revise(cid, -self.weights[cid])
        del self.weights[cid], self.examples[cid]
        self.expelled.append(cid)

    def admit(self, cid: ClientId, examples: int) -> None:
        """Take a client in, with the state of round 0, or with what it remembers if it was expelled.

        A mean m over clients of weight W becomes (W m + w_i s_i) / (W + w_i).
        """
        if cid in self.weights:
            raise ValueError(f"Client {cid!r} is in the federation already.")
        weight = self.algorithm.weight(examples)
        self._revise(cid, weight)
        self.weights[cid], self.examples[cid] = weight, examples
        self.expelled = [other for other in self.expelled if other != cid]

    def _revise(self, cid: ClientId, weight: float) -> None:
        """Add a client's share to the server's mean with a weight, which is negative for one that leaves."""
        total, share = sum(self.weights.values()), self.algorithm.share(self.recall(cid))
        self.stationarity = None
        if share is None or not len(self.store):  # all shares are still the same
            return
        own = wide(share)
        self.server = self.algorithm.revised(self.server, lambda m: (total * m + weight * own) / (total + weight))

    def follow_population(
        self, saved: Mapping[str, Any], leaving: Collection[ClientId], joining: Collection[ClientId]
    ) -> None:
        """Become the population that ``saved`` has, as far as it differs by clients that leave, join or have left.

        Those that leave need not be in the data any more; those that join are not in ``saved`` yet.
        """
        saved_counts = zip(saved["clients"], saved["examples"], strict=True)
        gone = {cid: count for cid, count in saved_counts if cid in leaving and cid not in self.examples}
        out = {*saved.get("expelled", []), *joining} - set(saved["clients"])
        self.examples = {cid: count for cid, count in {**self.examples, **gone}.items() if cid not in out}
        self.weights = {cid: self.algorithm.weight(count) for cid, count in self.examples.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings."""
        return {
            "algorithm": hyper_parameters(self.algorithm),
            "clients": self.client_ids,
            "examples": [self.examples[cid] for cid in self.client_ids],
            "expelled": list(self.expelled),
            "parameters": {name: list(shape) for name, (shape, _) in self.parameters.items()},
            "layouts": [list(layout.names) for layout in self.layouts],
            "x0": self.x0.cpu(),
            "server": tensors_of(self.server),
            "store": self.store.state_dict(),  # None where a checkpoint has records beside it
            "format": FORMAT,
            "buffers": {name: t.cpu() for name, t in self.buffers.items()},
            "personal": {name: t.cpu() for name, t in self.first.items()},
            "lr_sum": self.lr_sum,
            "rounds_done": self.rounds_done,
            "local_time": self.local_time,
            "cost": list(astuple(self.cost)),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where ``saved`` was taken, but for clients' memories; refuse the state of another federation."""
        self.check(saved)
        self.weights = {cid: self.weights[cid] for cid in saved["clients"]}  # cohorts are drawn by position
        device = self.x0.device
        self.layouts = [Layout.select(self.parameters, names) for names in saved["layouts"]]
        self.algorithm = self.algorithm.bind(self.layout)
        self.x0 = saved["x0"].to(device, self.layout.dtype)
        self.server = with_tensors(self.algorithm.init_server(self.x0), saved["server"])
        self.buffers = {name: t.to(device) for name, t in saved["buffers"].items()}
        self.first = {name: t.to(device) for name, t in saved.get("personal", {}).items()}
        self.moving = set(self.buffers.keys() & self.parameters.keys())
        self.rounds_done = saved["rounds_done"]
        self.expelled = list(saved["expelled"])
        self.local_time = saved["local_time"]
        self.cost = Cost(*saved["cost"])

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another version, another algorithm, other clients or another model."""
        if (made := saved.get("format", 1)) != FORMAT:
            by = "lightning_fed 0.1.0, or a development version of 0.2.0" if made < FORMAT else "a later lightning_fed"
            raise ValueError(
                f"The checkpoint was made by {by}, whose clients keep other variables (format {made}, this version"
                f" reads {FORMAT}). Finish the run with the version that began it, or load its weights into the module"
                " (load_from_checkpoint) and start a federation without ckpt_path."
            )
        ours, theirs = hyper_parameters(self.algorithm), saved["algorithm"]
        if ours["name"] != theirs["name"]:
            raise ValueError(
                f"The checkpoint was made by {theirs['name']}, this run uses {ours['name']}, which keeps other"
                f" variables. Resume with {theirs['name']}, or start a new run without ckpt_path."
            )
        if set(saved["server"]) != set(tensors_of(self.server)):
            raise ValueError(
                f"The checkpoint's server keeps {', '.join(saved['server'])}, with these settings {ours['name']} keeps"
                f" {', '.join(tensors_of(self.server))}. Resume with the settings of the checkpoint: {theirs}."
            )
        if set(saved["clients"]) != set(self.weights):
            raise ValueError(
                f"The checkpoint was made with {len(saved['clients'])} clients, this federation has"
                f" {len(self.weights)}{_difference(saved['clients'], self.client_ids)}. Resume with the same clients,"
                " or say before the fit who has left or joined: FederatedServer.expel(client), .admit(client)."
            )
        theirs_shapes = {name: tuple(shape) for name, shape in saved["parameters"].items()}
        our_shapes = {name: shape for name, (shape, _) in self.parameters.items()}
        if theirs_shapes != our_shapes:
            raise ValueError(
                f"The checkpoint was made with another model: its parameters are {_few(theirs_shapes)},"
                f" this module's are {_few(our_shapes)}."
            )
        odd = sorted((self.first.keys() ^ saved.get("personal", {}).keys()) & our_shapes.keys())
        if odd:
            whose = "here, but not in the checkpoint" if odd[0] in self.first else "in the checkpoint, but not here"
            raise ValueError(
                f"Parameter {odd[0]} is personal {whose}: clients keep other variables. Resume with the"
                " FederatedServer(personal=...) that began the run, or start a new run without ckpt_path."
            )
        counts = dict(zip(saved["clients"], saved["examples"], strict=True))
        warn_if_changed({**theirs, "samples by client": counts}, {**ours, "samples by client": self.examples})


def warn_if_changed(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Warn of settings that differ from those of the checkpoint."""
    changed = [f"{k}={v!r} (was {theirs.get(k)!r})" for k, v in ours.items() if theirs.get(k) != v]
    if changed:
        shown = ", ".join(text if len(text) < 200 else f"{text[:200]}..." for text in changed)
        warnings.warn(
            f"Resuming with other settings: {shown}. The run goes on, but is not the one that was interrupted.",
            stacklevel=2,
        )


def _difference(theirs: Sequence[ClientId], ours: Sequence[ClientId]) -> str:
    odd = sorted(set(theirs) ^ set(ours), key=str)
    return f" (for instance {odd[0]!r} is in only one of them)" if odd else ""


def _few(shapes: Mapping[str, tuple[int, ...]]) -> str:
    shown = ", ".join(f"{name} {shape}" for name, shape in list(shapes.items())[:3])
    return f"{shown}, ... ({len(shapes)} in all)" if len(shapes) > 3 else shown
