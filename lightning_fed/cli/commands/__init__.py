"""Commands in addition to ``fit``, ``validate``, ``test`` and ``predict``; ``cli.main.COMMANDS`` names them."""
