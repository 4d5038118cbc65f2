"""The ServerApp: a Trainer whose FederatedServer asks nodes by Flower."""

from __future__ import annotations

import os
from typing import Any

from flwr.serverapp import ServerApp

from lightning_fed.cli.deploying.serving import run_server
from lightning_fed.deploy.flower import FlowerTransport
from lightning_fed.deploy.places import SERVER, ServerPlace
from lightning_fed.engines.orphans import end_with

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator,unused-ignore]
def main(grid: Any, context: Any) -> None:
    """Run the federation of the folder that the environment names."""
    end_with(os.getppid())  # its SuperExec, which ends with the supervisor
    run_server(ServerPlace.running(os.environ[SERVER]), FlowerTransport(grid))
