"""`models/`, `datamodules/` and `configs/` lie at the top level and install below `lightning_fed`."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["lightning_fed", "lightning_fed.*"]),
        "lightning_fed.models",
        "lightning_fed.datamodules",
        "lightning_fed.datamodules.femnist",
        "lightning_fed.datamodules.leaf",
        "lightning_fed.datamodules.vision",
        "lightning_fed.configs",
    ],
    package_dir={
        "lightning_fed.models": "models",
        "lightning_fed.datamodules": "datamodules",
        "lightning_fed.configs": "configs",
    },
    package_data={
        "lightning_fed": ["py.typed"],
        "lightning_fed.core": ["*.c"],
        "lightning_fed.local.native": ["*.c", "*.h"],
        "lightning_fed.configs": ["*.yaml", "base/*.yaml"],
        "lightning_fed.datamodules.femnist": ["glyphs.txt"],
    },
)
