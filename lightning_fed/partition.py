"""Who gets which sample of one dataset: the public name of :mod:`lightning_fed.data.partition`."""

from lightning_fed.data.partition import *  # noqa: F403
from lightning_fed.data.partition import check_dealt as check_dealt
from lightning_fed.data.partition import hold_out as hold_out
from lightning_fed.data.partition import labels_of as labels_of
