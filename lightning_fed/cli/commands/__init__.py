"""Commands beside ``fit``, ``validate``, ``test`` and ``predict``; ``lightning_fed.cli.COMMANDS`` names them."""
