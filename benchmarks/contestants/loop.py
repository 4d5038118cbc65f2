"""FedADMM by hand, as a careful researcher writes it: tensors indexed directly, the penalty added to the gradients.

Or, as it is written in papers and more often in code, the penalty as a part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from workloads import Workload


class Loop:
    """A federation: ``play()`` is a round.

    Args:
        data: inputs and labels of every client.
        cohort: how many clients a round has.
        in_loss: leave the penalty to autograd.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Sequence[tuple[Tensor, Tensor]],
        cohort: int,
        steps: int,
        batch: int,
        lr: float = 0.01,
        eta: float = 1.0,
        in_loss: bool = False,
    ) -> None:
        self.model, self.data, self.cohort, self.steps, self.batch, self.eta = model, data, cohort, steps, batch, eta
        self.in_loss = in_loss
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=lr)
        self.x_bar = [p.detach().clone() for p in self.params]
        self.x_tilde = [x.clone() for x in self.x_bar]
        self.first = [x.clone() for x in self.x_bar]
        self.states: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # x_i and z_i of those who have taken part

    def play(self) -> None:
        """Visit a random cohort and average what has changed."""
        change = [torch.zeros_like(x) for x in self.x_bar]
        for i in torch.randperm(len(self.data))[: self.cohort].tolist():
            torch._foreach_add_(change, self.visit(i))
        torch._foreach_add_(self.x_tilde, change, alpha=1 / len(self.data))
        torch._foreach_copy_(self.x_bar, self.x_tilde)

    def visit(self, i: int) -> list[Tensor]:
        """Local work of a client; the change of its x_hat = x + z / eta."""
        x_i, z_i = self.states.get(i) or (self.first, [torch.zeros_like(x) for x in self.first])
        with torch.no_grad():
            torch._foreach_copy_(self.params, x_i)
            constant = torch._foreach_sub(z_i, self.x_bar, alpha=self.eta)
        for x, y in batches(self.data[i], self.batch, self.steps):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            if self.in_loss:
                (loss + self.penalty(z_i)).backward()
            else:
                loss.backward()
                with torch.no_grad():
                    gradients = [p.grad for p in self.params]
                    torch._foreach_add_(gradients, self.params, alpha=self.eta)
                    torch._foreach_add_(gradients, constant)
            self.optimizer.step()
        new = [p.detach().clone() for p in self.params]
        z_new = torch._foreach_add(z_i, torch._foreach_sub(new, self.x_bar), alpha=self.eta)
        self.states[i] = new, z_new
        change = torch._foreach_sub(new, x_i)
        torch._foreach_add_(change, torch._foreach_sub(z_new, z_i), alpha=1 / self.eta)
        return change

    def penalty(self, z_i: list[Tensor]) -> Tensor:
        """<z, x - x_bar> + eta/2 |x - x_bar|^2."""
        moves = [p - x for p, x in zip(self.params, self.x_bar, strict=True)]
        parts = [(z * d).sum() + self.eta / 2 * d.square().sum() for z, d in zip(z_i, moves, strict=True)]
        return torch.stack(parts).sum()


def batches(data: tuple[Tensor, Tensor], batch: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As many as there are steps, over reshuffled epochs."""
    x, y = data
    done = 0
    while True:
        for rows in torch.randperm(len(y)).split(batch):
            if done == steps:
                return
            yield x[rows], y[rows]
            done += 1


def run(workload: Workload, turn: Callable[[], None], threads: int, in_loss: bool = False) -> None:
    from contestants.networks import network

    torch.set_num_threads(threads)
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in workload.data()]
    w = workload
    loop = Loop(network(w.model), data, w.cohort, w.steps, w.batch, w.lr, w.eta, in_loss)
    while True:
        turn()
        loop.play()
