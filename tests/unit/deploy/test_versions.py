"""A node keeps what the server names, and nothing else; the journal holds what has happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_fed.algorithms import FedADMM
from lightning_fed.core.memory import Memory
from lightning_fed.deploy.journal import LINES, Journal, Lines
from lightning_fed.deploy.keys import NONE, Key
from lightning_fed.deploy.versions import LostStateError, StaleError, Versions
from lightning_fed.store import DamagedRecordError, LeaseError

FIRST, SECOND, THIRD = Key(1, 0, 0, 0), Key(1, 1, 0, 0), Key(1, 1, 0, 1)


def fresh() -> object:
    return FedADMM().init_client(torch.zeros(2))


def memory(value: float) -> Memory:
    return Memory(FedADMM().init_client(torch.full((2,), value)), visits=1)


def value(found: Memory) -> float:
    return float(found.state.x_hat_i[0])


def test_a_state_whose_answer_was_lost_is_rolled_back(tmp_path: Path) -> None:
    with Versions(tmp_path, fresh) as versions:
        versions.keep(FIRST, {"ann": memory(1), "bob": memory(2)})
        versions.keep(SECOND, {"ann": memory(3)})
        versions.settle({"ann": FIRST})
        assert (versions.of("ann"), versions.of("bob")) == ([FIRST], [FIRST])
        assert value(versions.get("ann", FIRST)) == 1


def test_a_state_whose_answer_arrived_is_rolled_forward_after_a_kill(tmp_path: Path) -> None:
    with Versions(tmp_path, fresh) as versions:
        versions.keep(FIRST, {"ann": memory(1)})
        versions.keep(SECOND, {"ann": memory(3)})
    with Versions(tmp_path, fresh) as versions:  # another process
        versions.settle({"ann": SECOND})
        assert versions.of("ann") == [SECOND]
        assert value(versions.get("ann", SECOND)) == 3


def test_a_client_that_the_server_knows_nothing_of_begins_anew(tmp_path: Path) -> None:
    with Versions(tmp_path, fresh) as versions:
        versions.keep(FIRST, {"ann": memory(1)})
        versions.settle({"ann": NONE})
        assert versions.of("ann") == []
        assert value(versions.get("ann", NONE)) == 0


def test_a_state_that_the_node_does_not_have_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    with Versions(tmp_path, fresh) as versions, pytest.raises(LostStateError, match=r"1\.1\.0\.0 of client 'ann'"):
        versions.get("ann", SECOND)


def test_an_instruction_is_followed_once_and_in_order_also_after_a_restart(tmp_path: Path) -> None:
    with Versions(tmp_path, fresh) as versions:
        versions.begin(SECOND)
    with Versions(tmp_path, fresh) as versions:
        for old in (SECOND, FIRST):
            with pytest.raises(StaleError):
                versions.begin(old)
        versions.begin(THIRD)
        versions.begin(Key(2, 0, 0, 0))  # the server was restarted, and resumes an earlier round


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with Versions(tmp_path, fresh), pytest.raises(LeaseError):
        Versions(tmp_path, fresh)


def test_ids_of_clients_keep_their_types(tmp_path: Path) -> None:
    with Versions(tmp_path, fresh) as versions:
        versions.keep(FIRST, {1: memory(1), "1": memory(2)})
        versions.settle({1: NONE})
        assert (versions.of(1), versions.of("1")) == ([], [FIRST])


def test_a_line_that_was_cut_short_never_happened(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for round in (0, 1):
            journal.checkpoint_for(round).write_text("state")
            journal.commit(round, {"cohort": []})
        run = journal.run
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    for cut in (1, 10, 50):
        path.write_bytes(whole[:-cut])
        with Journal(tmp_path) as journal:
            assert (journal.rounds_done, journal.run, journal.incarnation) == (1, run, 2)


def test_every_start_has_its_own_number_and_one_process_holds_the_journal(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        assert journal.incarnation == 1
        with pytest.raises(LeaseError):
            Journal(tmp_path)
    with Journal(tmp_path) as journal:
        assert journal.incarnation == 2


def test_the_journal_keeps_the_last_two_checkpoints(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for round in range(4):
            journal.checkpoint_for(round).write_text("state")
            journal.commit(round, {})
        assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["round-000002.ckpt", "round-000003.ckpt"]


def test_any_changed_byte_of_a_journal_is_an_error_or_the_end_of_its_last_line(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for round in (0, 1):
            journal.checkpoint_for(round).write_text("state")
            journal.commit(round, {"cohort": ["ann"]})
    path = tmp_path / LINES
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found = len(Lines(path).read())
        except DamagedRecordError:
            continue
        assert (at, found) == (len(whole) - 1, 2)  # the line of round 1 was never ended
    for text in (whole.replace(b"\n", b" ", 1), b""):
        path.write_bytes(text)
        with pytest.raises(DamagedRecordError):
            Journal(tmp_path)  # a run is not begun anew for it
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    path.write_bytes(whole)
    Journal(tmp_path).close()


def test_checkpoints_that_a_kill_has_left_are_removed(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for round in range(3):
            journal.checkpoint_for(round).write_text("state")
            journal.commit(round, {})
    for round in (0, 3):  # the first was not removed in time, the last has no line
        journal.checkpoint_for(round).write_text("state")
    with Journal(tmp_path):
        assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["round-000001.ckpt", "round-000002.ckpt"]


def test_lines_are_read_while_they_are_written_and_each_only_once(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        lines = Lines(tmp_path / LINES)
        assert [entry["event"] for entry in lines.read()] == ["start"]
        size = lines.size
        with (tmp_path / LINES).open("ab") as file:
            file.write(b'{"event": "ro')  # the beginning of a line
        assert (len(lines.read()), lines.size) == (1, size)
        with (tmp_path / LINES).open("rb+") as file:
            file.truncate(size)
        journal.commit(0, {})
        assert [entry["event"] for entry in lines.read()] == ["start", "round"]
