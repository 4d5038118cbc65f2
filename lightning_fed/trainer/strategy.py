"""Lightning's launchers and ranks for rounds: every process has the whole module, and nothing is wrapped."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lightning_fed.lightning import (
    DDPStrategy,
    MultiProcessingLauncher,
    PlainStrategy,
    StrategyRegistry,
    pl,
    reset_seed,
    share_no_loaders,
)
from lightning_fed.trainer.hooks import is_server
from lightning_fed.trainer.ranks import MEETING, RankError, Ranks

#: Longest time that a process waits for the others at the end of its share of a round.
TIMEOUT = timedelta(minutes=5)

_MEETINGS = count()
#: Where processes meet, by address, port and number. Kept: a second Trainer of a script would make a store at the same
#: port, and find that of the first where another process is slower.
_STORES: dict[tuple[str, int, int], Any] = {}


class Launcher(MultiProcessingLauncher):
    """Forks or spawns the processes of a run; the first gives the server's results back to the one that called fit."""

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """In the first process: what the calling one gets, as bytes, because tensors in memory would be shared."""
        results = [callback.results() for callback in trainer.callbacks if is_server(callback)]
        return {**super().get_extra_results(trainer), "federated": pickle.dumps(results)}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """In the process that called ``fit``."""
        super().update_main_process_results(trainer, extra)
        servers: list[Any] = [callback for callback in trainer.callbacks if is_server(callback)]
        for server, results in zip(servers, pickle.loads(extra["federated"]), strict=True):
            server.take_results(results)


class FederatedStrategy(PlainStrategy):
    """Runs a federation in several processes, on one machine or more: ``Trainer(strategy="federated", devices=4)``.

    Has the launchers of Lightning's ``DDPStrategy``, but wraps no module and reduces no gradient: each process visits
    its share of the cohort, and the server's model is bitwise that of one process (docs/scaling.md). Lightning's
    ``"ddp"`` means the same, with this timeout.

    Args:
        timeout: longest time that a process waits for the others at the end of its share of a round.
        start_method: ``popen`` starts the script again for every process; ``fork`` is for notebooks.

    >>> import pytorch_lightning as pl
    >>> strategy = FederatedStrategy(timeout=timedelta(minutes=20))
    >>> pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, barebones=True).world_size
    2
    """

    ranks: Ranks | None = None
    forking = Launcher

    def __init__(self, timeout: timedelta = TIMEOUT, **kwargs: Any) -> None:
        super().__init__(timeout=timeout, **kwargs)

    def setup_distributed(self) -> None:
        """Meet the other processes, in a group of their own."""
        reset_seed()
        self.set_world_ranks()
        if self.ranks is None:
            self.ranks = _met(self, self.patience)

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the module as on one device; refuse a fit without rounds, whose processes would never agree."""
        if trainer.state.fn == "fit" and not any(map(is_server, trainer.callbacks)):
            raise ValueError(
                'strategy="federated" shares the clients of a FederatedServer, and there is none among the callbacks.'
                ' Add one, or use strategy="ddp" to share the batches of a plain fit.'
            )
        share_no_loaders(trainer)  # also without a server, in validate, test and predict
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the model, and start from the first process's weights, as DDP does."""
        super().model_to_device()
        assert self.ranks is not None
        assert self.model is not None
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.copy_(self.ranks.spread(tensor.detach().cpu().contiguous(), 0))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the other processes."""
        if self.ranks is not None:
            self.ranks.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What one process has."""
        return obj if self.ranks is None else self.ranks.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Nothing to reduce: what clients log is merged over processes, and all other values are the same in each."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes, or any, have decided for it."""
        found = [decision] if self.ranks is None else self.ranks.gather(bool(decision))
        return min(found) if all else max(found)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Nothing to gather: all processes have the same values."""
        return tensor

    def on_exception(self, exception: BaseException) -> None:
        """End the other processes of this machine if one of them is lost: a stopped one would stay for ever."""
        if isinstance(exception, RankError) and self.launcher is not None:
            self.launcher.kill(signal.SIGKILL)


def adopt(trainer: pl.Trainer) -> None:
    """Make Lightning's own DDP strategy, whose processes run already, a federated one; leave loaders as they are."""
    strategy = trainer.strategy
    if type(strategy) is DDPStrategy:
        ranks = _met_elsewhere(strategy)
        torch.distributed.destroy_process_group()  # or metrics and users' code would gather over it inside a visit
        strategy.__class__ = FederatedStrategy
        strategy.ranks = ranks
    if isinstance(strategy, FederatedStrategy):
        share_no_loaders(trainer)


def _met_elsewhere(strategy: DDPStrategy) -> Ranks:
    """Meet on a port of our own: the store of DDP's group must end with it, or its next group finds old addresses."""
    environment, rank, size = strategy.cluster_environment, strategy.global_rank, strategy.world_size
    assert environment is not None
    with socket.socket() as free:
        free.bind(("", 0))
        port = strategy.broadcast(int(free.getsockname()[1]))
    store = torch.distributed.TCPStore(environment.main_address, port, size, rank == 0, MEETING)
    return Ranks.meet(store, rank, size, TIMEOUT)


def _met(strategy: DDPStrategy, timeout: timedelta) -> Ranks:
    """Meet the other processes where Lightning's environment, torchrun's or SLURM's says."""
    environment, rank, size = strategy.cluster_environment, strategy.global_rank, strategy.world_size
    assert environment is not None
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    place = environment.main_address, environment.main_port, size
    if place not in _STORES:
        store, *_ = next(iter(torch.distributed.rendezvous("env://", rank, size, timeout=max(timeout, MEETING))))
        _STORES[place] = store
    attempt = os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", "0"
    )  # torchrun's store outlives the processes that it starts
    room = f"lightning_fed/{attempt}/{next(_MEETINGS)}"  # a script may have several Trainers, one after another
    return Ranks.meet(torch.distributed.PrefixStore(room, _STORES[place]), rank, size, timeout)


def register() -> None:
    """Make ``Trainer(strategy="federated")`` known, with its launchers for scripts, notebooks and spawned processes."""
    methods = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for ending, method in methods.items():
        name = f"federated{ending}"
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, FederatedStrategy, f"Federation ({method})", start_method=method)
