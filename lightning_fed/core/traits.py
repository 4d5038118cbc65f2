"""Facts about an algorithm that engines, checks and theory read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DualSteps:
    r"""Dual step :math:`\sigma` and server step :math:`\lambda` of a primal-dual method, for its stability.

    Args:
        gain: :math:`ab = \sigma\lambda`.
        rate: :math:`a = \sigma\tau`, with :math:`\tau` the planned sum of step sizes of a visit, or 1 / penalty if
            ``solved``; None if unknown.
        solved: whether visits are to solve a local problem, rather than to take so many steps.
    """

    gain: float
    rate: float | None = None
    solved: bool = False


@dataclass(frozen=True)
class Traits:
    """Facts about an algorithm that decide how rounds are run, checked and assessed.

    Args:
        penalty: the ``rho`` of the local problem in every round; 0 where there is none.
        relaxation: the alpha of its Douglas-Rachford steps, 1 for plain ones; None where FedADMM's bounds do not apply.
        everybody: whether every client has to take part in every round.
        exchanges: how often the server asks the cohort in one round; the server's state knows which of them is due.
        requires: what optimisers have to be, each with the reason: ``plain_sgd``, ``sgd`` (momentum is
            allowed) and ``no_weight_decay``.
        full_start: whether every client is asked once before round 0, as part of the initial state.
        plans_steps: whether ``broadcast`` needs the planned sum of step sizes, ``LocalWork.lr_sum``. To compute it,
            schedulers by step are stepped ahead and then reset.
        sends_changes: whether messages are changes of a client variable whose sum the server keeps, so that a
            part of a change that compression drops must be sent later.

    >>> from lightning_fed.algorithms import FedADMM
    >>> FedADMM(eta=2.0).traits.penalty, FedADMM().traits.everybody
    (2.0, False)
    """

    penalty: float = 0.0
    relaxation: float | None = None
    everybody: bool = False
    exchanges: int = 1
    requires: Mapping[str, str] = field(default_factory=dict)
    full_start: bool = False
    plans_steps: bool = False
    sends_changes: bool = False

    @property
    def plain_sgd(self) -> str | None:
        """Why local steps have to be plain gradient steps; None if any optimiser will do."""
        return self.requires.get("plain_sgd")

    @property
    def sgd(self) -> str | None:
        """Why local steps have to be those of SGD, with or without momentum; None if any optimiser will do."""
        return self.requires.get("sgd")

    @property
    def no_weight_decay(self) -> str | None:
        """Why an optimiser must not add weight decay; None where it is but a part of every client's loss."""
        return self.requires.get("no_weight_decay")
