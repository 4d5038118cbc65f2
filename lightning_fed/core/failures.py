"""Clients that fail: what counts as a failure, and what becomes of the round."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from lightning_fed.core.validation import is_number, one_of, positive, whole

OnError = Literal["raise", "skip"]
FaultKind = Literal["raised", "not finite", "too far", "too slow", "dropped out"]

#: Why a visit failed.
RAISED: FaultKind = "raised"
NOT_FINITE: FaultKind = "not finite"
TOO_FAR: FaultKind = "too far"
TOO_SLOW: FaultKind = "too slow"
DROPPED: FaultKind = "dropped out"


class OvertimeError(Exception):
    """A visit has exceeded its time limit."""


class FaultError(Exception):
    """A client's training raised because a :class:`Fault` wants it."""


@dataclass(frozen=True)
class Fault:
    """A failure that a callback asks for, to study how robust a run is.

    Args:
        kind: ``raised``, ``not finite``, ``too far``, ``too slow`` or ``dropped out``.
        size: the value of every parameter that is not finite, the distance from the server's model, or the seconds that
            a visit counts as longer; None for other kinds.
        by: who asks for it.

    >>> Fault("not finite", size=float("nan")).kind
    'not finite'
    >>> Fault("too slow")
    Traceback (most recent call last):
    ValueError: Fault.size must be ...
    """

    kind: FaultKind = DROPPED
    size: float | None = None
    by: str = "a callback"

    def __post_init__(self) -> None:
        one_of(self, "kind", get_args(FaultKind))
        if self.kind in (TOO_FAR, TOO_SLOW):
            positive(self, "size", "It is the distance from the server's model, or the seconds that a visit is longer.")
        elif self.kind != NOT_FINITE and self.size is not None:
            raise ValueError(f"Fault.size has no meaning for a client that {self.kind}, got {self.size!r}. Omit it.")
        elif self.kind == NOT_FINITE and (not is_number(self.size) or isfinite(self.size)):
            raise ValueError(f"Fault.size must be nan, inf or -inf for a fault that is not finite, got {self.size!r}.")


@dataclass(frozen=True)
class Failure:
    """A client that gave no reply: the server does without it, and its state stays that before the visit.

    Args:
        kind: ``raised``, ``not finite``, ``too far``, ``too slow`` or ``dropped out``.
        reason: in words, with round and client.
        steps: local steps that the visit took all the same.
        sent: whether the server's message went out to the client.
        injected: whether a callback such as :class:`~lightning_fed.callbacks.Faults` asked for it.
    """

    kind: str
    reason: str
    steps: int = 0
    sent: bool = True
    injected: bool = False


@dataclass(frozen=True)
class FailurePolicy:
    r"""When a client has failed, and what becomes of its round.

    A client fails if its training raises, if its loss, model or message is not finite, if its model is too far from
    the server's, if it takes too long, or if :class:`~lightning_fed.callbacks.Faults` says so.

    Args:
        action: ``raise`` ends the fit, and the round leaves no trace. ``skip`` leaves the client out of the round on
            both sides: its state is the one before the visit, and the server averages the others.
        retries: visits that a client gets after one that raised or took too long. A visit draws the same batches
            again, so that a retry helps against passing trouble such as a data server that is away; numbers that are
            not finite would come out again and are not retried.
        min_clients: the fewest replies that make a round. With fewer, the round is repeated with another cohort. By
            default 1 in a round with failures; an empty cohort that the sampler drew stays an empty round.
        attempts: cohorts that are tried for one round, before it is an error. That of attempt k is drawn from
            ``(seed, round, k)``.
        max_distance: the largest :math:`\|x_i - \bar x\|` that is believed, with the server's model of the round.
        max_seconds: the most that a visit may take, looked at between its batches. Clients are then trained one by
            one or by workers, never as a stack; and a run is no longer a function of its seed alone.

    >>> FailurePolicy("skip", min_clients=5).skips
    True
    """

    action: OnError = "raise"
    retries: int = 0
    min_clients: int | None = None
    attempts: int = 3
    max_distance: float | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        one_of(self, "action", ("raise", "skip"))
        whole(self, "retries", 0)
        whole(self, "min_clients", 1, optional=True)
        whole(self, "attempts", 1)
        if self.max_distance is not None:
            positive(self, "max_distance", "It bounds the norm of x_i - x_bar; None for no bound.")
        if self.max_seconds is not None:
            positive(self, "max_seconds", "It bounds the time of a visit; None for no limit.")

    @property
    def skips(self) -> bool:
        """Whether a round goes on without clients that failed."""
        return self.action == "skip"

    @property
    def lenient(self) -> bool:
        """Whether a client's error may be anything but the end of the fit."""
        return self.skips or self.retries > 0

    @property
    def consequence(self) -> str:
        """What has become of the round, for messages about a client's numbers."""
        return "The client is left out of the round." if self.skips else "The round was not committed."

    def is_short(self, replies: int, failures: Collection[object]) -> bool:
        """Whether so many replies are too few to make a round."""
        least = (1 if failures else 0) if self.min_clients is None else self.min_clients
        return replies < least


#: The default: the first client that fails ends the fit.
RAISE = FailurePolicy()


@dataclass(frozen=True)
class Retry:
    """Short for ``FailurePolicy("skip", retries=n)``: visit a client that failed ``n`` times more, then leave it out.

    >>> as_policy(Retry(2))
    FailurePolicy(action='skip', retries=2, min_clients=None, attempts=3, max_distance=None, max_seconds=None)
    """

    n: int = 1

    def __post_init__(self) -> None:
        whole(self, "n", 1)


def as_policy(value: OnError | Retry | FailurePolicy) -> FailurePolicy:
    """The policy that is meant by a word, a :class:`Retry`, or a policy.

    >>> as_policy("skip").skips
    True
    """
    if isinstance(value, FailurePolicy):
        return value
    if isinstance(value, Retry):
        return FailurePolicy("skip", retries=value.n)
    if value not in ("raise", "skip"):
        raise ValueError(
            f'FederatedServer.on_client_error must be "raise", "skip", Retry(n) or a FailurePolicy, got {value!r}.'
        )
    return FailurePolicy(value)


def check_policy(policy: FailurePolicy, algorithm: str, everybody: bool) -> None:
    """Refuse to leave out clients of an algorithm that needs everybody."""
    if everybody and policy.skips:
        raise ValueError(
            f"{algorithm} needs every client in every round, so that on_client_error cannot be skip. Use raise, such as"
            ' FailurePolicy("raise", retries=2), or an algorithm for a part of the clients, such as FedADMM.'
        )
