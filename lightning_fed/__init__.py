"""Turn ``Trainer.fit`` into a federation."""

import sys
from importlib.util import find_spec

if find_spec(f"{__name__}.models") is None:  # models, datamodules and configs lie beside the package in a clone
    raise ImportError(
        f"{__file__} is a clone's folder, which Python took for the installed package because it is the current folder,"
        " or on the path. Install the clone with `pip install -e .`, or run from another folder."
    )

from lightning_fed._version import __version__
from lightning_fed.data import partition
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.laboratory import Exact, FiniteSum, GradientDescent, Quadratic
from lightning_fed.laboratory.simulate import simulate
from lightning_fed.server import FederatedServer
from lightning_fed.trainer.strategy import FederatedStrategy

# a public path: lightning_fed.partition is in the room of data
sys.modules[f"{__name__}.partition"] = partition

__all__ = [
    "Exact",
    "FederatedDataModule",
    "FederatedServer",
    "FederatedStrategy",
    "FiniteSum",
    "GradientDescent",
    "Quadratic",
    "__version__",
    "simulate",
]
