"""An algorithm that runs another one: every method is that of ``inner``, unless a subclass says otherwise."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import DualSteps, Traits


class Forwarding(Algorithm[Any, Any, Any]):
    """Forwards every step to the algorithm ``inner``."""

    @property
    @abstractmethod
    def inner(self) -> Algorithm[Any, Any, Any]:
        """The algorithm that does the work."""

    def init_server(self, x0: Tensor) -> Any:
        return self.inner.init_server(x0)

    def init_client(self, x0: Tensor) -> Any:
        return self.inner.init_client(x0)

    def broadcast(self, server: Any, work: LocalWork) -> Broadcast:
        return self.inner.broadcast(server, work)

    def bytes_down(self, down: Broadcast) -> int:
        return self.inner.bytes_down(down)

    def client_step(self, client: Any, down: Broadcast, local: Local) -> Reply[Any, Any]:
        return self.inner.client_step(client, down, local)

    def server_step(self, server: Any, total: Total[Any]) -> Any:
        return self.inner.server_step(server, total)

    def weight(self, num_examples: int) -> float:
        return self.inner.weight(num_examples)

    def share(self, client: Any) -> Tensor | None:
        return self.inner.share(client)

    def revised(self, server: Any, revise: Callable[[Tensor], Tensor]) -> Any:
        return self.inner.revised(server, revise)

    def acknowledge(self, before: Any, after: Any, arrived: Any, down: Broadcast) -> Any:
        return self.inner.acknowledge(before, after, arrived, down)

    @property
    def acknowledges(self) -> bool:
        return self.inner.acknowledges

    def local_model(self, client: Any) -> Tensor | None:
        return self.inner.local_model(client)

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    @property
    def dual_steps(self) -> DualSteps | None:
        return self.inner.dual_steps
