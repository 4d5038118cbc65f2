"""Which writers take part and what they train on; arguments are refused before anything is read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.femnist_files import arrays, caches, people, write_leaf, write_npz, write_split
from omegaconf import OmegaConf

from lightning_fed.datamodules import FEMNIST
from lightning_fed.datamodules.femnist import Selection, Source, Split
from lightning_fed.datamodules.femnist.characters import Characters, DataError
from lightning_fed.datamodules.femnist.selection import select, split_as_given, split_by_sample, split_by_user

COUNTS = {"dan": 10, "ann": 1, "cyd": 2, "bob": 3, "eve": 20, "fay": 4}


def source(core: list[str] | None = None) -> Characters:
    nothing = np.zeros(0, np.uint8)
    return Characters("these", False, list(COUNTS), np.cumsum(list(COUNTS.values())), nothing, nothing, None, core)


def sizes(rows: dict[str, Any]) -> dict[str, int]:
    return {name: len(held) for name, held in rows.items()}


def together(*parts: dict[str, Any]) -> list[int]:
    return sorted(int(row) for part in parts for held in part.values() for row in held)


def test_without_options_everybody_takes_part_in_the_order_of_the_source() -> None:
    rows = select(source())
    assert list(rows) == list(COUNTS)
    assert sizes(rows) == COUNTS
    assert together(rows) == list(range(40))


def test_named_writers_come_in_the_order_of_the_source() -> None:
    assert list(select(source(), writers=["eve", "dan", "eve"])) == ["dan", "eve"]


def test_an_unknown_writer_is_refused_with_names_that_are_close() -> None:
    with pytest.raises(DataError, match=r"FEMNIST.writers names 'danny', which these does not have. It has dan"):
        select(source(), writers=["eve", "danny"])


def test_a_number_of_writers_is_drawn_by_the_seed() -> None:
    draws = {seed: list(select(source(), writers=3, seed=seed)) for seed in range(20)}
    assert draws[4] == list(select(source(), writers=3, seed=4))
    assert len({tuple(names) for names in draws.values()}) > 5
    assert {name for names in draws.values() for name in names} == set(COUNTS)
    for names in draws.values():
        assert names == [name for name in COUNTS if name in names]


def test_more_writers_are_the_same_and_some_more() -> None:
    assert set(select(source(), writers=2, seed=1)) < set(select(source(), writers=4, seed=1))


def test_more_writers_than_there_are_is_refused() -> None:
    assert len(select(source(), writers=4, min_samples=3)) == 4
    with pytest.raises(DataError, match=r"FEMNIST.writers is 5, but only 4 writers of these are left"):
        select(source(), writers=5, min_samples=3)


def test_writers_with_too_few_characters_are_left_out() -> None:
    assert list(select(source(), min_samples=4)) == ["dan", "eve", "fay"]
    with pytest.raises(DataError, match=r"No writer of these has 21 characters. Lower min_samples"):
        select(source(), min_samples=21)


def test_only_core_writers_are_taken_where_they_are_marked() -> None:
    assert list(select(source(core=["dan", "eve"]), core=True)) == ["dan", "eve"]
    with pytest.raises(DataError, match="core=True, but these does not mark core writers"):
        select(source(), core=True)
    with pytest.raises(DataError, match="names 'bob'"):
        select(source(core=["dan", "eve"]), core=True, writers=["bob"])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.99])
def test_a_fraction_is_whole_writers_and_one_that_is_cut_short(fraction: float, seed: int) -> None:
    rows = select(source(), fraction=fraction, seed=seed)
    everybody = select(source())
    assert sum(sizes(rows).values()) == int(fraction * 40)
    assert sum(len(held) < COUNTS[name] for name, held in rows.items()) <= 1
    assert list(rows) == [name for name in COUNTS if name in rows]
    for name, held in rows.items():
        assert held.tolist() == everybody[name][: len(held)].tolist()


def test_a_fraction_without_a_single_character_is_said_to_be_too_small() -> None:
    with pytest.raises(DataError, match="fraction"):
        select(source(), fraction=0.01)


def test_a_writer_that_the_fraction_cut_short_counts_as_it_is_left() -> None:
    for seed in range(10):
        rows = select(source(), fraction=0.5, min_samples=4, seed=seed)
        assert min(sizes(rows).values()) >= 4


@pytest.mark.parametrize(
    ("train_fraction", "train"),
    [
        (0.9, {"dan": 9, "cyd": 1, "bob": 2, "eve": 18, "fay": 3}),
        (0.5, {"dan": 5, "cyd": 1, "bob": 1, "eve": 10, "fay": 2}),
        (0.01, {"dan": 1, "cyd": 1, "bob": 1, "eve": 1, "fay": 1}),
        (1.0, {"dan": 10, "cyd": 1, "bob": 3, "eve": 20, "fay": 4}),
    ],
)
def test_a_split_by_sample_leaves_every_writer_the_floor_and_at_least_one(
    train_fraction: float, train: dict[str, int]
) -> None:
    rows = select(source())
    kept, tested = split_by_sample(rows, train_fraction, seed=0)
    assert sizes(kept) == train
    assert sizes(tested) == {name: COUNTS[name] - train[name] for name in train if COUNTS[name] > train[name]}
    assert together(kept, tested) == together({name: rows[name] for name in train})


@pytest.mark.parametrize("split", [split_by_sample, split_by_user])
def test_splits_are_drawn_by_the_seed(split: Any) -> None:
    rows = select(source())

    def drawn(seed: int) -> list[int]:
        return together(split(rows, 0.5, seed)[0])

    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in range(10)}) > 5


def test_what_a_writer_trains_on_does_not_depend_on_the_others() -> None:
    rows = select(source())
    alone = split_by_sample({"eve": rows["eve"]}, 0.5, seed=0)[0]
    assert together(alone) == together({"eve": split_by_sample(rows, 0.5, seed=0)[0]["eve"]})


@pytest.mark.parametrize(("train_fraction", "count"), [(0.9, 5), (0.5, 3), (0.01, 1), (1.0, 6)])
def test_a_split_by_user_takes_whole_writers(train_fraction: float, count: int) -> None:
    rows = select(source())
    train, test = split_by_user(rows, train_fraction, seed=0)
    assert len(train) == count
    assert not set(train) & set(test)
    assert {name: len(held) for part in (train, test) for name, held in part.items()} == COUNTS
    for part in (train, test):
        assert list(part) == [name for name in COUNTS if name in part]


def test_a_given_split_is_kept_and_nobody_is_empty() -> None:
    marks = np.zeros(40, dtype=bool)
    marks[:3] = marks[10] = True  # three of dan, all of ann
    train, test = split_as_given(select(source()), marks)
    assert sizes(train) == {"dan": 7, "cyd": 2, "bob": 3, "eve": 20, "fay": 4}
    assert sizes(test) == {"dan": 3, "ann": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "csv"}, "Source.kind must be one of auto, leaf, npz, parquet, nist; got 'csv'"),
        ({"split": "writer"}, "Split.by must be one of auto, given, sample, user; got 'writer'"),
        ({"pixels": {"dtype": "float16"}}, "Pixels.dtype must be one of float32, float64; got 'float16'"),
        ({"selection": {"fraction": 0.0}}, "Selection.fraction must be positive and at most 1, got 0.0"),
        ({"selection": {"fraction": 1.5}}, "Selection.fraction must be positive and at most 1, got 1.5"),
        ({"selection": {"fraction": float("nan")}}, "Selection.fraction must be positive and at most 1, got nan"),
        ({"selection": {"fraction": "0.5"}}, "Selection.fraction must be positive and at most 1, got '0.5'"),
        ({"split": {"train_fraction": -0.1}}, "Split.train_fraction must be positive and at most 1, got -0.1"),
        ({"split": {"train_fraction": 90}}, "Split.train_fraction must be positive and at most 1, got 90"),
        ({"selection": {"min_samples": -1}}, "Selection.min_samples must be a whole number >= 0, got -1"),
        ({"selection": {"min_samples": 2.0}}, "Selection.min_samples must be a whole number >= 0, got 2.0"),
        ({"seed": "0"}, "FEMNIST.seed must be a whole number, got '0'"),
        ({"seed": None}, "FEMNIST.seed must be a whole number, got None"),
        ({"writers": 0}, "FEMNIST.writers must be a whole number >= 1, got 0"),
        ({"writers": True}, "FEMNIST.writers must be a whole number >= 1, got True"),
        ({"writers": 2.5}, "FEMNIST.writers must be a number or a list of names, got 2.5"),
        ({"writers": "ann"}, "FEMNIST.writers must be a number or a list of names, got 'ann'"),
        ({"writers": []}, r"FEMNIST.writers must be a number or a list of names, got \[\]"),
        ({"batch_size": 0}, "FEMNIST.batch_size must be a whole number >= 1, got 0"),
        ({"path": None, "source": "leaf"}, "source kind 'leaf' .*but no path"),
        ({"path": None, "selection": {"core": True}}, "core=True, but no path"),
        ({"source": {"download": True}}, "FEMNIST.source.download needs a kind out of nist, parquet and a path"),
        ({"source": {"download": True, "kind": "leaf"}}, "FEMNIST.source.download needs a kind"),
        ({"source": {"download": True, "kind": "nist"}, "path": None}, "FEMNIST got source kind 'nist'"),
        ({"selection": {"min_sample": 3}}, "FEMNIST.selection has no option 'min_sample'. It has core, fraction, min"),
        ({"split": {"train": 0.5}}, "FEMNIST.split has no option 'train'. It has by, train_fraction"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FEMNIST(**{"path": "nowhere", **arguments})
    assert caches() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"selection": 5}, r"FEMNIST.selection must be Selection\(...\) or a mapping with some of core, fraction, min"),
        ({"pixels": "float64"}, r"FEMNIST.pixels must be Pixels\(...\) or a mapping with some of invert, dtype; got"),
        ({"core": True}, "FEMNIST has no argument 'core' any more. Write selection={'core': True}"),
        ({"min_samples": 3}, "FEMNIST has no argument 'min_samples' any more. Write selection="),
        ({"colour": 3}, "unexpected keyword argument 'colour'"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_with_what_to_write(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FEMNIST(**{"path": "nowhere", **arguments})


def test_groups_of_arguments_are_given_as_objects_mappings_or_omegaconf() -> None:
    given: dict[str, Any] = {"min_samples": 3, "core": True}
    for selection in (Selection(**given), given, OmegaConf.create(given)):
        data = FEMNIST("nowhere", selection=selection, source={"kind": "leaf", "cache_dir": Path("here")}, split="user")
        assert data.selection == Selection(core=True, min_samples=3)
        assert (data.source, data.split) == (Source("leaf", cache_dir="here"), Split("user"))
        assert data.hparams["selection"] == {"core": True, "fraction": 1.0, "min_samples": 3}
        assert (data.hparams["batch_size"], data.hparams["eval_batch_size"]) == (10, 512)


@pytest.mark.parametrize("stage", ["prepare_data", "setup"])
def test_a_path_that_does_not_exist_is_refused_when_it_is_needed(stage: str) -> None:
    with pytest.raises(DataError, match=r"nowhere: there is no such file or folder. Wanted a folder of LEAF JSON"):
        getattr(FEMNIST("nowhere"), stage)()


def test_an_empty_folder_is_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(DataError, match="empty: found nothing to read in it"):
        FEMNIST("empty").setup()


def test_a_given_split_is_asked_for_in_vain_where_there_is_none() -> None:
    file = write_leaf(Path("all_data.json"), people(ann=3))
    with pytest.raises(DataError, match=r"FEMNIST.split is 'given', but FEMNIST .* of all_data.json has none"):
        FEMNIST(file, split="given").setup()


def test_core_is_asked_for_in_vain_where_nobody_is_marked() -> None:
    with pytest.raises(DataError, match=r"core=True, but .* does not mark core writers"):
        FEMNIST(write_leaf(Path("all_data.json"), people(ann=3)), selection={"core": True}).setup()


def test_writers_with_one_character_each_leave_nothing_to_train_on() -> None:
    with pytest.raises(DataError, match=r"No writer of .* has characters to train on"):
        FEMNIST(write_leaf(Path("all_data.json"), people(ann=1, bob=1))).setup()


@pytest.mark.parametrize(("split", "train", "test"), [("auto", 4, 2), ("given", 4, 2), ("sample", 3, 3)])
def test_the_split_of_the_source_is_taken_unless_another_is_asked_for(split: Any, train: int, test: int) -> None:
    data = FEMNIST(
        write_split(Path("leaf"), people(1, ann=4), people(2, ann=2)), split={"by": split, "train_fraction": 0.5}
    )
    data.setup()
    assert (data.num_examples("ann"), len(data.client_dataset("ann", "test"))) == (train, test)


def test_core_writers_of_an_npz_are_chosen() -> None:
    source = write_npz(Path("w.npz"), {**arrays(people(ann=3, bob=3, cyd=3)), "writer_core": [True, False, True]})
    data = FEMNIST(source, selection=Selection(core=True))
    data.setup()
    assert data.client_ids == ["ann", "cyd"]
