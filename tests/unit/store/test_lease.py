"""One writer per folder."""

import os
import signal
import time

import pytest

from lightning_fed.store import Lease, LeaseError


def test_a_second_process_is_refused_at_once_and_takes_over_from_a_dead_one(tmp_path):
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        lease = Lease(tmp_path)
        os.write(writer, b"held")
        time.sleep(60)
        lease.release()
    assert os.read(reader, 10) == b"held"
    began = time.monotonic()
    with pytest.raises(LeaseError, match=f"in use by process {holder} on .*, since 20"):
        Lease(tmp_path)
    assert time.monotonic() - began < 1
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    Lease(tmp_path).release()


def test_a_child_that_outlives_its_parent_does_not_hold_the_lease(tmp_path):
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        lease = Lease(tmp_path)
        if os.fork() == 0:
            os.write(writer, b"%d" % os.getpid())
            time.sleep(60)
        assert lease is not None
        time.sleep(60)
    child = int(os.read(reader, 20))
    with pytest.raises(LeaseError, match=f"process {parent}"):
        Lease(tmp_path)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.kill(child, 0)  # the child lives
    Lease(tmp_path).release()
    os.kill(child, signal.SIGKILL)


def test_a_lease_whose_note_is_damaged_is_still_held(tmp_path):
    with Lease(tmp_path) as lease:
        lease.path.write_bytes(b"\xff")
        with pytest.raises(LeaseError, match="in use by another process"):
            Lease(tmp_path)
    lease.release()
