"""Examples in docstrings import `pytorch_lightning`, as tests do, also when they are run without the tests."""

import os
from importlib.util import find_spec

os.environ.setdefault("LIGHTNING_FED_PACKAGE", "pytorch_lightning")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "agg")

#: Modules that import flwr, which installs from Python 3.11 on alone.
_OF_FLOWER = ["deploy/flower.py", "deploy/relay.py", "deploy/superlink.py", "deploy/worker.py"]
_OF_FLOWER += ["cli/deploying/server_app.py", "cli/deploying/node_process.py"]
collect_ignore_glob = [] if find_spec("flwr") else [f"lightning_fed/{name}" for name in _OF_FLOWER]
