"""`models/`, `datamodules/` and `configs/` lie at the top level and install below `lightning_fed`."""

from setuptools import Extension, find_packages, setup

setup(
    packages=[
        *find_packages(include=["lightning_fed", "lightning_fed.*"]),
        "lightning_fed.models",
        "lightning_fed.datamodules",
        "lightning_fed.datamodules.femnist",
        "lightning_fed.configs",
    ],
    package_dir={
        "lightning_fed.models": "models",
        "lightning_fed.datamodules": "datamodules",
        "lightning_fed.configs": "configs",
    },
    package_data={
        "lightning_fed": ["py.typed"],
        "lightning_fed.configs": ["*.yaml", "base/*.yaml"],
        "lightning_fed.datamodules.femnist": ["glyphs.txt"],
    },
    ext_modules=[
        Extension(
            "lightning_fed.local.native._linear",
            ["lightning_fed/local/native/linear.c"],
            depends=["lightning_fed/local/native/linear.h"],
            extra_compile_args=["-O3", "-fopenmp-simd"],
            optional=True,  # without a compiler, torch's own operators do the work
        ),
        Extension(
            "lightning_fed.core._draws",
            ["lightning_fed/core/draws.c"],
            extra_compile_args=["-O3"],
            optional=True,  # without a compiler, NumPy draws the same numbers
        ),
    ],
)
