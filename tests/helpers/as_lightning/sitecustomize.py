"""Let tests, documents and examples that import ``pytorch_lightning`` get ``lightning.pytorch``, module by module.

For ``LIGHTNING_FED_PACKAGE=lightning make pytest``: conftest.py runs this file, and child processes do because this
folder is on their PYTHONPATH. Tests of the choice itself do not use it.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

REAL = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class Alias:
    """Finds each module under its other name, and gives the very same module."""

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        return ModuleSpec(name, self) if root in REAL else None

    def create_module(self, spec):
        root, dot, rest = spec.name.partition(".")
        module = import_module(REAL[root] + dot + rest)
        self.own = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.own  # the import system has replaced it by the one of the alias


sys.meta_path.insert(0, Alias())
