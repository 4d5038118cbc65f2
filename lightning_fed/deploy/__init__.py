"""Real federations: the same algorithms over a network, with Flower as the engine (docs/howto/deploy.md)."""
