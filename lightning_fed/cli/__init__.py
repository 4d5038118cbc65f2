"""The command line: ``lightning-fed fit``, ``reproduce``, ``compare``, ``advise``, ``tune``, ``data``, ``deploy``."""

from lightning_fed.cli.main import COMMANDS, FederatedCLI, main, run

__all__ = ["COMMANDS", "FederatedCLI", "main", "run"]
