__version__ = "0.2.0.dev0"
"""The installed version.

>>> from lightning_fed import __version__
>>> int(__version__.split(".")[0]) >= 0
True
"""
