"""A folder in RAM, where a sync costs nothing: a killed process, unlike a power failure, loses no writes."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")


@pytest.fixture
def ram(tmp_path):
    if not os.access(SHARED, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="lightning_fed_", dir=SHARED))
    yield folder
    shutil.rmtree(folder)
