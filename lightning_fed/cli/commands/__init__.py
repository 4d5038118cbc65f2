"""Commands beside ``fit``, ``validate``, ``test`` and ``predict``; :data:`lightning_fed.cli.main.COMMANDS` names them."""
