"""Client memories on disk, and checkpoint files that are complete or absent."""

from lightning_fed.store.checkpoint_file import (
    DamagedCheckpointError,
    is_unsealed,
    read_sealed,
    seal,
    verify,
    write_sealed,
)
from lightning_fed.store.damage import DamagedRecordError
from lightning_fed.store.disk import DiskStore
from lightning_fed.store.durable import WriteError
from lightning_fed.store.lease import Lease, LeaseError
from lightning_fed.store.records import Location, Record, read
from lightning_fed.store.snapshots import memories_in, read_manifest, summaries_in, verify_snapshot
from lightning_fed.store.space import check_space

__all__ = [
    "DamagedCheckpointError",
    "DamagedRecordError",
    "DiskStore",
    "Lease",
    "LeaseError",
    "Location",
    "Record",
    "WriteError",
    "check_space",
    "is_unsealed",
    "memories_in",
    "read",
    "read_manifest",
    "read_sealed",
    "seal",
    "summaries_in",
    "verify",
    "verify_snapshot",
    "write_sealed",
]
