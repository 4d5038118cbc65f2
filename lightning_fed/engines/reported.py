"""Play a round with the cohorts that the policy allows, and report it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from lightning_fed.core.failures import Failure
from lightning_fed.core.memory import ClientId
from lightning_fed.core.round import Outcome
from lightning_fed.engines.failed_clients import TooFewClientsError
from lightning_fed.engines.player import RoundPlayer
from lightning_fed.theory.residuals import distances, dual_residual, mean_distance
from lightning_fed.trainer.hooks import RoundReport, notify
from lightning_fed.trainer.ranks import ranks_of

#: Draws the cohort of an attempt at the next round.
Draw = Callable[[int], list[ClientId]]


def reported_round(
    player: RoundPlayer, cohort: list[ClientId], draw: Draw, is_measured: Callable[[], bool]
) -> RoundReport:
    """Play and commit a round; also after an error, the module holds the server's last committed model.

    Args:
        player: plays the round.
        cohort: of the first attempt.
        draw: draws the cohorts of further attempts, 1 and so on, where too many clients fail.
        is_measured: whether the primal residual is measured in the round that was just committed.
    """
    federation = player.federation
    before = {} if federation.started else _start(player)
    began, old = time.monotonic(), federation.server.x_bar
    outcome, cohort, failures, attempts = _attempts(player, cohort, draw)
    failures = {**before, **failures}
    metrics = {
        "clients": float(len(outcome.states)),  # clients whose replies arrived
        "dual_residual": dual_residual(federation.algorithm, old, federation.server.x_bar),
        "bytes_down": float(federation.bytes_down),
        "bytes_up": float(federation.bytes_up),
        "local_steps": float(federation.cost.steps),
        "full_gradients": float(federation.cost.gradients),
        "seconds": time.monotonic() - began - player.rehearsal,  # without evaluation
    }
    if is_measured():
        known_here = partial(distances, federation, outcome)
        metrics["primal_residual"] = mean_distance(ranks_of(player.trainer).merged(known_here, cohort))
    if player.settings.policy.skips:
        metrics["failed_clients"] = float(len(failures))
    known = [loss for loss in outcome.losses.values() if loss == loss]
    if known:
        metrics |= {"local_loss": sum(known) / len(known), "local_loss_min": min(known), "local_loss_max": max(known)}
    return RoundReport(federation.rounds_done - 1, cohort, outcome.losses, metrics, failures, attempts)


def _start(player: RoundPlayer) -> dict[ClientId, Failure]:
    """Ask everybody once before round 0; clients that fail begin with the state of round 0, and count in it."""
    outcome = player.play(player.federation.client_ids)
    player.failed.count(outcome, outcome.failures)
    return outcome.failures


def _attempts(
    player: RoundPlayer, cohort: list[ClientId], draw: Draw
) -> tuple[Outcome, list[ClientId], dict[ClientId, Failure], int]:
    """Play a round, with other cohorts where clients fail; the last cohort, all failures, number of attempts."""
    failures: dict[ClientId, Failure] = {}
    most = player.settings.policy.attempts
    for attempt in range(1, most + 1):
        notify(player.trainer, "on_round_start", player.federation.rounds_done, cohort)
        try:
            outcome = player.play(cohort)
        except TooFewClientsError as error:
            failures |= error.failures
            if attempt == most:
                raise TooFewClientsError(
                    f"{error} The round was tried with {attempt} cohorts and is not committed. Mend these clients,"
                    " lower FailurePolicy.min_clients, or draw larger cohorts.",
                    failures,
                ) from None
            cohort = draw(attempt)
        else:
            failures |= outcome.failures
            player.failed.count(outcome, failures)
            break
    return outcome, cohort, failures, attempt
