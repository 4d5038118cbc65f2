"""LEAF's Shakespeare, Sentiment140 and CelebA: numbers by LEAF's rules, clients and splits, and what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.leaf_files import account, role, write_faces, write_people, write_shard, write_some
from torch import Tensor

from lightning_fed.datamodules import Leaf
from lightning_fed.datamodules.femnist.characters import DataError
from lightning_fed.datamodules.leaf.encoding import ALL_LETTERS
from lightning_fed.models import CelebaCNN, Sent140LSTM, ShakespeareLSTM

NAMES = ("shakespeare", "sent140", "celeba")
HERE = Path("leaf")
TEXT = "".join(chr(ord("a") + i % 26) for i in range(300))
RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(*args: Any, **kwargs: Any) -> Leaf:
    data = Leaf(*args, **kwargs)
    data.prepare_data()
    data.setup()
    return data


def batch(data: Leaf, user: str, split: str = "train") -> list[Tensor]:
    return next(iter(data.client_eval_dataloader(user, split)))


# -- values -----------------------------------------------------------------------------------------------------


def test_characters_are_numbered_by_leafs_alphabet_and_unknown_ones_are_its_last() -> None:
    assert len(ALL_LETTERS) == len(set(ALL_LETTERS)) == 80
    line = '\n !"09AZ[]az}~\u00e9\ud800'.ljust(80)
    write_people(HERE, {"KING": ([line, line], ["T", "\u2014"])})
    x, y = batch(made("shakespeare", HERE, test_fraction=0.0), "KING")
    assert x.dtype == y.dtype == torch.int64
    assert x[0, :16].tolist() == [0, 1, 2, 3, 11, 20, 25, 50, 51, 52, 53, 78, 79, 79, 79, 79]
    assert x[0, 16:].tolist() == [1] * 64
    assert y.tolist() == [44, 79]


def test_words_are_those_most_frequent_in_the_training_data_and_ties_follow_the_alphabet() -> None:
    train = {"ann": account(("the cat, the dog", 1), ("The cat", 0)), "bob": account(("zoo the", 1))}
    write_people(HERE, train, {"ann": account(("unseen cat unseen unseen", 0))})
    data = made("sent140", HERE, vocabulary=4)  # the: 3; cat: 2; "," The dog zoo: 1 each
    assert data.words == 4
    x, y = batch(data, "ann")
    assert x.shape == (2, 25)
    assert x[0].tolist() == [0, 1, 2, 0, 4] + [4] * 20
    assert x[1].tolist() == [3, 1] + [4] * 23
    assert y.tolist() == [1, 0]
    assert batch(data, "bob")[0][0].tolist() == [4, 0] + [4] * 23
    assert batch(data, "ann", "test")[0][0].tolist() == [4, 1, 4, 4] + [4] * 21


def test_a_tweet_is_cut_after_25_words_and_marks_are_words_as_in_leaf() -> None:
    write_people(HERE, {"ann": account(("@x I'm #1: a-b!? ...".replace("...", "w " * 30), 1), ("", 0))})
    Path("embs.json").write_text(json.dumps({"vocab": ["x", "I'm", "1", "a", "b", "!", "?", "w"], "emba": [[0.5]]}))
    data = made("sent140", HERE, vocabulary="embs.json", test_fraction=0.0)
    x, _ = batch(data, "ann")
    assert x[0].tolist() == [*range(7), *[7] * 18]
    assert x[1].tolist() == [8] * 25
    assert data.words == 8


def test_words_after_the_25th_do_not_count_for_the_vocabulary() -> None:
    write_people(HERE, {"ann": account(("w " * 25 + "far " * 50, 1))})
    data = made("sent140", HERE, vocabulary=1, test_fraction=0.0)
    assert batch(data, "ann")[0].tolist() == [[0] * 25]


def test_faces_are_read_when_they_are_needed_as_84_by_84_in_red_green_and_blue() -> None:
    write_faces(HERE, a=RED, b=BLUE)
    write_people(HERE, {"7": (["a.png", "b.png", "a.png"], [1.0, 0.0, 1])})
    data = made("celeba", HERE, test_fraction=0.0)
    x, y = batch(data, "7")
    assert x.shape == (3, 3, 84, 84)
    assert x.dtype == torch.float32
    assert x[:, :, 40, 40].tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert y.tolist() == [1, 0, 1]
    write_faces(HERE, a=BLUE)
    assert batch(data, "7")[0][0, :, 40, 40].tolist() == [0, 0, 1]


def test_images_may_lie_elsewhere() -> None:
    write_faces(Path("other"), a=RED)
    write_people(HERE, {"7": (["a.png"], [1])})
    data = made("celeba", HERE, images="other/raw/img_align_celeba", test_fraction=0.0)
    assert batch(data, "7")[0].shape == (1, 3, 84, 84)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_leaf_takes_what_the_data_give(name: str) -> None:
    data = made(name, write_some(name, HERE), vocabulary=50)
    model = {"shakespeare": ShakespeareLSTM(), "sent140": Sent140LSTM(data.words), "celeba": CelebaCNN()}[name]
    x, y = next(iter(data.client_dataloader("ann")))
    assert torch.isfinite(torch.nn.functional.cross_entropy(model(x), y))
    assert len(data.class_names) == model(x).shape[1]


# -- clients and splits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_client_is_a_user_and_the_split_of_the_folder_is_kept(name: str) -> None:
    data = made(name, write_some(name, HERE), test_fraction=0.5)
    assert data.client_ids == data.split_ids("test") == ["ann", "bob", "cyd"]
    assert data.num_examples("ann") == len(data.client_dataset("ann", "test"))
    assert data.description.startswith(f"LEAF's {name} (3 clients, {3 * data.num_examples('ann')} train, ")


def test_users_that_only_test_are_evaluated_and_never_visited() -> None:
    write_people(HERE, {"ann": account(("good", 1))}, {"bob": account(("bad", 0))})
    data = made("sent140", HERE)
    assert (data.client_ids, data.split_ids("test")) == (["ann"], ["bob"])


def test_without_a_split_every_user_tests_on_a_share_of_its_own() -> None:
    everybody = {user: account(*[(f"{user} {i}", i % 2) for i in range(20)]) for user in ("ann", "bob")}
    write_people(HERE, everybody | {"one": account(("single", 1))})
    data = made("sent140", HERE, test_fraction=0.25)
    assert [data.num_examples(user) for user in data.client_ids] == [15, 15, 1]
    assert data.split_ids("test") == ["ann", "bob"]
    seen = [row for split in ("train", "test") for row in batch(data, "ann", split)[0][:, 1].tolist()]
    assert sorted(seen) == sorted({*seen}), "no tweet is in both"
    assert len(seen) == 20
    assert not made("sent140", HERE, test_fraction=0.0).has_split("test")


def windows(data: Leaf, split: str) -> list[int]:
    """Of a text of 300 different places, where the lines of a split begin."""
    held = data.client_dataset("KING", split)
    return [int(held[i][0][0]) for i in range(len(held))]


@pytest.mark.parametrize("how", [{"test_fraction": 0.5}, {"test_fraction": 0.0, "val_fraction": 0.5}])
def test_overlapping_lines_are_cut_where_they_share_no_character(how: dict[str, float]) -> None:
    lines, following = role(TEXT)  # 220 lines; the i-th begins at character i
    write_people(HERE, {"KING": (lines, following), "PAGE": role(TEXT[:100])})
    data = made("shakespeare", HERE, **how)
    split = "test" if how["test_fraction"] else "val"
    assert windows(data, "train") == [53 + i % 26 for i in range(110)]
    assert windows(data, split) == [53 + i % 26 for i in range(189, 220)]  # the last to train on ends at 188
    assert data.num_examples("PAGE") == 20, "too short to spare any"
    assert data.split_ids(split) == ["KING"]


def test_a_test_shard_of_shakespeare_may_count_the_lines_that_leaf_left_out() -> None:
    """LEAF's split_data.py leaves 79 lines out before the test data, but counts them."""
    lines = role(TEXT[:90])
    write_people(HERE, {"KING": lines}, {"KING": lines})
    shard = next((HERE / "test").iterdir())
    write_shard(shard, {"KING": lines}, num_samples=[10 + 79])
    assert len(made("shakespeare", HERE).client_dataset("KING", "test")) == 10
    write_shard(shard, {"KING": lines}, num_samples=[10 + 78])
    with pytest.raises(DataError, match="user 'KING': has 10 samples, but 'num_samples' says 88"):
        made("shakespeare", HERE)
    write_people(HERE, {"KING": lines}, {"KING": lines})
    write_shard(next((HERE / "train").iterdir()), {"KING": lines}, num_samples=[10 + 79])
    with pytest.raises(DataError, match="user 'KING': has 10 samples, but 'num_samples' says 89"):
        made("shakespeare", HERE)


def test_users_that_leafs_split_left_without_data_and_name_are_left_out() -> None:
    everybody = {"ann": account(("good", 1)), "one": ([], [])}
    for part in ("train", "test"):
        write_shard(HERE / part / "all_data.json", everybody, users=["ann"], num_samples=[1])
    assert made("sent140", HERE).client_ids == ["ann"]


def test_small_users_are_left_out_and_a_number_of_the_others_is_drawn() -> None:
    everybody = {f"u{k}": account(*[("good", 1)] * k) for k in range(1, 9)}
    write_people(HERE, everybody, {"u3": account(("bad", 0))})
    assert made("sent140", HERE, min_samples=4).client_ids == [f"u{k}" for k in range(3, 9)]
    drawn = made("sent140", HERE, clients=3, min_samples=4).client_ids
    assert len(drawn) == 3
    assert set(drawn) <= {f"u{k}" for k in range(3, 9)}
    assert drawn == made("sent140", HERE, clients=3, min_samples=4).client_ids
    assert len({tuple(made("sent140", HERE, clients=3, seed=seed).client_ids) for seed in range(8)}) > 1


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_samples(name: str) -> None:
    folder = write_some(name, HERE)
    (first, second) = (made(name, folder, clients=2, val_fraction=0.4 if name != "shakespeare" else 0.0) for _ in "ab")
    assert first.client_ids == second.client_ids
    for user in first.client_ids:
        assert all(torch.equal(a, b) for a, b in zip(batch(first, user), batch(second, user), strict=True))


def test_the_data_can_be_pickled_for_processes_that_load_them() -> None:
    for name in NAMES:
        data = made(name, write_some(name, HERE / name))
        again = pickle.loads(pickle.dumps(data.client_dataset("ann")))
        assert torch.equal(torch.as_tensor(again[0][0]), torch.as_tensor(data.client_dataset("ann")[0][0]))


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_missing_data_are_refused_with_the_commands_that_make_them(name: str) -> None:
    how = rf"in data/{name} of a clone of github.com/TalwalkarLab/leaf, run \./preprocess.sh .*data/{name}/data"
    with pytest.raises(DataError, match=rf"^nowhere: there is no such folder\. .*{how}"):
        made(name, "nowhere")
    HERE.mkdir()
    with pytest.raises(DataError, match=rf"^leaf: has no LEAF shards in it.*{how}"):
        made(name, HERE)


LINE = "x" * 80
ANN = "user 'ann': "
MALFORMED = {
    "short line": ("shakespeare", ["x" * 79], ["a"], ANN + r"x\[0\] must be a text of length 80, got 79 characters"),
    "no line": ("shakespeare", [LINE, [1]], ["a", "b"], ANN + r"x\[1\] must be a text of length 80, got 1 of them"),
    "two characters": ("shakespeare", [LINE], ["ab"], ANN + r"y\[0\] must be a text of length 1, got 2 characters"),
    "class as a number": ("shakespeare", [LINE], [7], ANN + r"y\[0\] must be a text of length 1, got 7"),
    "more lines": ("shakespeare", [LINE] * 2, ["a"], ANN + "has 2 lines and 1 labels"),
    "no data": ("shakespeare", [], [], ANN + "has no data"),
    "text for a row": ("sent140", ["good"], [1], ANN + r"x\[0\] must be LEAF's row of a tweet .*, got 'good'"),
    "short row": ("sent140", [["good"]], [1], ANN + r"x\[0\] must be LEAF's row of a tweet .*, got 1 of them"),
    "number for a text": ("sent140", [["", "", "", "", 3]], [1], ANN + r"x\[0\] must be LEAF's row of a tweet"),
    "mood 4": ("sent140", [["", "", "", "", "good"]], [4], ANN + "label 4 is not 0 or 1"),
    "true mood": ("sent140", [["", "", "", "", "good"]], [True], ANN + "label True is not 0 or 1"),
    "mood as a list": ("sent140", [["", "", "", "", "good"]], [[1]], ANN + r"label \[1\] is not 0 or 1"),
    "more labels": ("celeba", ["a.png"], [1, 0], ANN + "has 1 images and 2 labels"),
    "smile -1": ("celeba", ["a.png"], [-1], ANN + "label -1 is not 0 or 1"),
    "number for a name": ("celeba", [1], [1], ANN + r"x\[0\] must be the name of an image file, got 1"),
    "missing image": ("celeba", ["a.png", "z.png"], [1, 0], r"img_align_celeba/z.png: there is no such file.*images="),
}


@pytest.mark.parametrize(("name", "x", "y", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_data_are_refused_by_user_and_problem(name: str, x: list[Any], y: list[Any], message: str) -> None:
    write_faces(HERE, a=RED)
    write_people(HERE, {"ann": (x, y)})
    with pytest.raises(DataError, match=message):
        made(name, HERE, test_fraction=0.0)


def test_a_file_that_is_no_image_is_named_when_it_is_read() -> None:
    write_faces(HERE, a=RED)
    (HERE / "raw" / "img_align_celeba" / "a.png").write_bytes(b"no image")
    write_people(HERE, {"ann": (["a.png"], [1])})
    data = made("celeba", HERE, test_fraction=0.0)
    with pytest.raises(DataError, match=r"a\.png: cannot be read as an image"):
        data.client_dataset("ann")[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ('{"emba": []}', "wanted a vocabulary"),
        ('{"vocab": []}', "wanted a vocabulary"),
        ('{"vocab": [1]}', "wanted a vocabulary"),
        ('{"vocab": ["a", "b", "a"]}', "1 words more than once"),
    ],
)
def test_a_bad_vocabulary_is_refused_by_its_file(text: str | None, problem: str) -> None:
    if text is not None:
        Path("words.json").write_text(text)
    write_some("sent140", HERE)
    with pytest.raises(DataError, match=rf"^words\.json: .*{problem}"):
        made("sent140", HERE, vocabulary="words.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "reddit"}, "Leaf.dataset must be one of shakespeare, sent140, celeba; got 'reddit'"),
        ({"clients": 0}, "Leaf.clients must be a whole number >= 1, got 0"),
        ({"min_samples": -1}, "Leaf.min_samples must be a whole number >= 0"),
        ({"test_fraction": 1.0}, "Leaf.test_fraction must be non-negative and below 1"),
        ({"vocabulary": 0}, "Leaf.vocabulary must be a whole number >= 1"),
        ({"seed": 0.5}, "Leaf.seed must be a whole number"),
        ({"val_fraction": -0.1}, "Leaf.val_fraction must be non-negative"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Leaf(**{"dataset": "sent140", "folder": HERE, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 4}, "Leaf.clients is 4, but leaf has 3 users to draw from"),
        ({"min_samples": 1000}, "no user has training data and 1000 samples. Lower min_samples"),
        ({"val_fraction": 0.5}, "val_fraction is 0.5, but no user has samples to spare.*79 are left out"),
    ],
)
def test_what_the_data_cannot_give_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("shakespeare", write_some("shakespeare", HERE), **arguments)


def test_a_test_share_that_no_text_can_spare_is_refused() -> None:
    write_people(HERE, {"KING": role(TEXT[:150])})
    with pytest.raises(DataError, match=r"test_fraction is 0\.1, but no user has samples to spare"):
        made("shakespeare", HERE)
