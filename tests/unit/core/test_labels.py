"""Labels of client ids: printable, encodable, and unlike for unlike ids."""

from __future__ import annotations

import pytest
from helpers.strange_ids import STRANGE_IDS
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.labels import label_of

ids = st.integers() | st.text(st.characters(), max_size=80) | st.text("'\"\\ 019+-.(", max_size=4)


@pytest.mark.parametrize("cid", ["ann", "f0001_41", "Zoë", "a b", "1.5", "user@host", 0, -3])
def test_a_plain_id_is_its_own_label(cid: int | str) -> None:
    assert label_of(cid) == str(cid)


def test_strange_ids_have_labels_of_their_own() -> None:
    labels = [label_of(cid) for cid in STRANGE_IDS]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) < 150


@given(ids, ids)
def test_every_label_is_printable_and_stands_for_one_id(one: int | str, other: int | str) -> None:
    label = label_of(one)
    assert label.isprintable()
    assert label.encode()
    assert label == label.strip()
    assert (label == label_of(other)) == (one == other)


def test_long_ids_that_begin_alike_have_unlike_labels() -> None:
    assert label_of("a" * 10_000) != label_of("a" * 9_999 + "b")
    assert label_of("\udc80" * 10_000).isprintable()
