"""Import paths that users rely on; a move inside the package must keep them."""

from __future__ import annotations

import os
from importlib import import_module

import pytest

PATHS = {
    "lightning_fed": "FederatedServer FederatedStrategy FederatedDataModule simulate"
    " Quadratic FiniteSum Exact GradientDescent",
    "lightning_fed.algorithms": "FedADMM FedDR FedDRII ParallelDRS FedPD FedAvg FedProx FedDyn FedSplit Scaffold",
    "lightning_fed.prox": "Prox Zero L1 Box GroupLasso Sum",
    "lightning_fed.sampling": "Sampler Uniform Full",
    "lightning_fed.transforms": "Clip Quantize TopK Compose",
    "lightning_fed.callbacks": "FederatedCallback ClientEvaluation FederatedProgressBar FinalFigure TheoryMeter",
    "lightning_fed.core": "Algorithm Broadcast Question Reply Solution Total record hyper_parameters num_bytes",
    "lightning_fed.theory": "Bounds ExactBounds eta_min residual_for Tolerance Absolute Relative Summable",
    "lightning_fed.data": "FederatedDataModule TensorRows row_by_row",
    "lightning_fed.models": "",
    "lightning_fed.datamodules": "FEMNIST Leaf Synthetic Vision",
    "lightning_fed.partition": "IID Dirichlet Shards Sizes ByKey Pathological Continuous as_partitioner",
    "lightning_fed.tracking": "AutoWandbLogger",
    "lightning_fed.engines": "ClientError DivergenceError",
    "lightning_fed.cli": "run",
}


@pytest.mark.parametrize("module", PATHS)
def test_public_names_are_where_they_were(module: str) -> None:
    found = import_module(module)
    assert [name for name in PATHS[module].split() if not hasattr(found, name)] == []


def test_the_root_has_few_names() -> None:
    root = import_module("lightning_fed").__path__[0]

    hidden = ("__init__.py", "__main__.py", "_version.py", "py.typed", "__pycache__")
    found = [name for name in os.listdir(root) if name not in hidden]
    modules = (name for name in found if name.endswith(".py") or os.path.exists(f"{root}/{name}/__init__.py"))
    names = list(modules)  # not what older builds left behind
    assert len(names) <= 19, sorted(names)
