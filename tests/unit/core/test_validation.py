"""Numbers given as text are refused as such, wherever numbers are checked."""

from __future__ import annotations

import pytest

from lightning_fed.algorithms import FedADMM, FedAvgM, FedPD, FedProx
from lightning_fed.data.partition import Dirichlet
from lightning_fed.prox import L1
from lightning_fed.theory.tolerance import Relative


@pytest.mark.parametrize(
    "build",
    [
        lambda: FedADMM(eta="1"),
        lambda: FedADMM(alpha="1"),
        lambda: FedProx(mu="1"),
        lambda: FedPD(eta_hat="1"),
        lambda: FedAvgM(beta="1"),
        lambda: Dirichlet("1", 0.5),
        lambda: L1("1"),
        lambda: Relative("1"),
    ],
)
def test_text_is_refused_with_what_would_be_right(build):
    with pytest.raises((TypeError, ValueError), match="'1', which is text: give a number, without quotes"):
        build()
