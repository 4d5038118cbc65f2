"""The survey of a federation has the values of its formulas, and says where it has none."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.data.survey import Labels, describe, survey, table
from lightning_fed.data.survey_figures import MAX_ROWS, as_image, contact_sheet, histograms
from lightning_fed.partition import IID


def federation(*labels, **splits):
    """One client per list of labels."""
    return FederatedDataModule([samples(y) for y in labels], **splits)


def samples(y):
    return TensorDataset(torch.zeros(len(y), 3), torch.tensor(y))


def images(x, clients=2):
    return FederatedDataModule([TensorDataset(x, torch.arange(len(x))) for _ in range(clients)])


class Untouched(Dataset):
    """Has targets, which count how often they are read; its samples must not be."""

    reads = 0

    @property
    def targets(self):
        type(self).reads += 1
        return [0, 1] * 10

    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise AssertionError("the samples were read")


# -- distances --------------------------------------------------------------------------------------------------


def test_two_clients_with_disjoint_labels_are_half_way_from_the_pool():
    labels = survey(federation([0] * 5, [1] * 5)).labels
    assert labels.total_variation == pytest.approx([0.5, 0.5])
    # H(3/4, 1/4) - (H(1, 0) + H(1/2, 1/2)) / 2
    assert labels.jensen_shannon == pytest.approx([1.5 - 0.75 * np.log2(3)] * 2)
    assert labels.effective_classes == pytest.approx([1, 1])


def test_n_clients_with_disjoint_labels_come_close_to_distance_one():
    labels = survey(federation(*([c] for c in range(1000)))).labels
    assert labels.total_variation == pytest.approx(np.full(1000, 0.999))
    assert labels.jensen_shannon.min() > 0.99


def test_clients_with_the_same_mix_have_distance_zero_whatever_their_sizes():
    labels = survey(federation([0, 1, 2], [0, 1, 2] * 7)).labels
    assert labels.total_variation == pytest.approx([0, 0])
    assert labels.jensen_shannon == pytest.approx([0, 0])
    assert labels.effective_classes == pytest.approx([3, 3])


def test_the_pool_weighs_samples_and_the_mean_weighs_clients():
    labels = survey(federation([0] * 9, [1])).labels
    assert labels.p == pytest.approx([0.9, 0.1])
    assert labels.total_variation == pytest.approx([0.1, 0.9])
    assert "0.500 (client to pool" in describe(survey(federation([0] * 9, [1])))


@given(st.integers(1, 6).flatmap(lambda k: st.lists(st.lists(st.integers(0, 50), min_size=k, max_size=k), min_size=1)))
@settings(max_examples=200, deadline=None)
def test_distances_lie_between_0_and_1_and_bound_each_other(rows):
    counts = np.array(rows)
    counts[:, 0] += 1  # nobody is empty
    labels = Labels(list(range(counts.shape[1])), counts)
    tv, js = labels.total_variation, labels.jensen_shannon
    assert ((tv >= 0) & (tv <= 1)).all()
    assert ((js >= 0) & (js <= 1)).all()
    assert (js <= tv + 1e-12).all()
    assert (labels.effective_classes <= labels.classes + 1e-9).all()
    assert (labels.effective_classes >= 1 - 1e-9).all()


# -- sizes ------------------------------------------------------------------------------------------------------


def test_samples_and_clients_are_counted_by_split():
    found = survey(federation([0, 1, 1], [0], [2, 2], test={2: samples([0, 1]), 0: samples([1])}))
    assert found.clients_per_split == {"train": 3, "test": 2}
    assert found.samples_per_split == {"train": 6, "test": 3}
    assert found.samples["test"].tolist() == [1, 0, 2]
    assert found.labels.names == [0, 1, 2]
    assert found.labels.counts.tolist() == [[1, 2, 0], [1, 0, 0], [0, 0, 2]]
    assert found.labels.classes.tolist() == [2, 1, 1]


def test_equal_sizes_have_a_gini_coefficient_of_zero():
    found = survey(federation(*[[0] * 4] * 5))
    assert found.gini == pytest.approx(0)
    assert found.largest_share == pytest.approx(0.2)


def test_the_gini_coefficient_is_the_mean_difference_over_twice_the_mean():
    found = survey(federation([0], [0] * 2, [0] * 6))
    n = np.array([1, 2, 6])
    assert found.gini == pytest.approx(np.abs(n[:, None] - n).mean() / (2 * n.mean()))
    assert found.largest_share == pytest.approx(6 / 9)
    assert found.by_size.tolist() == [2, 1, 0]


def test_clients_who_only_test_are_listed_without_labels():
    data = federation([0, 1], [1])
    data.splits["test"] = {"new": samples([1, 1, 1])}
    found = survey(data)
    assert found.clients == [0, 1, "new"]
    assert found.sizes.tolist() == [2, 1]
    assert table(found)[-1] == ["new", "0", "3", "", "", ""]
    assert "new" not in describe(found)


# -- labels -----------------------------------------------------------------------------------------------------


def test_labels_are_taken_from_targets_which_are_read_once_for_all_clients():
    data = FederatedDataModule.from_dataset(Untouched(), IID(clients=5))
    Untouched.reads = 0
    found = survey(data)
    assert found.labels.counts.sum(axis=0).tolist() == [10, 10]
    assert Untouched.reads <= 2, "labels_of looks at them, and asks for them"


def test_a_subset_of_a_subset_has_the_labels_of_its_samples():
    whole = samples([5, 6, 7, 8])
    data = FederatedDataModule([Subset(Subset(whole, [3, 1, 0]), [0, 2]), Subset(whole, [1])])
    assert survey(data).labels.names == [5, 6, 8]
    assert survey(data).labels.counts.tolist() == [[1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("names", [["cat", "dog"], [True, False], [2.0, 5.0], [-1, 10**9]])
def test_labels_may_be_of_any_kind(names):
    data = FederatedDataModule([[(torch.zeros(2), name)] * 3 for name in names])
    assert survey(data).labels.names == sorted(names)


def test_regression_targets_are_said_to_have_no_classes():
    found = survey(federation([0.5, 1.0], [2.0, 3.0]))
    assert found.labels is None
    assert "Labels: The targets are real numbers" in describe(found)
    assert table(found) == [["client", "train"], ["0", "2"], ["1", "2"]]
    assert len(histograms(found).axes) == 1


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(torch.zeros(4, 3)), [torch.zeros(3)] * 4, [(torch.zeros(3), torch.zeros(2))] * 4, ["text"] * 4],
    ids=["features alone", "bare tensors", "vectors", "strings"],
)
def test_data_without_labels_are_surveyed_all_the_same(dataset):
    data = FederatedDataModule({"ann": dataset})
    found = survey(data)
    assert (found.labels, found.sizes.tolist()) == (None, [4])
    assert "Labels: " in describe(found)
    assert "label" in found.note
    assert contact_sheet(data) is None


def test_data_that_are_not_set_up_are_refused():
    with pytest.raises(ValueError, match="it is empty: call setup"):
        survey(FederatedDataModule())


# -- the report -------------------------------------------------------------------------------------------------


def test_the_report_names_the_five_largest_and_the_five_smallest_clients():
    report = describe(survey(federation(*([0] * (n + 1) for n in range(20)))))
    largest, smallest = report.split("The 5 ")[1:]
    assert [line.split()[0] for line in largest.splitlines()[2:7]] == ["19", "18", "17", "16", "15"]
    assert [line.split()[0] for line in smallest.splitlines()[2:7]] == ["4", "3", "2", "1", "0"]


def test_the_report_names_every_client_of_a_small_federation_once():
    report = describe(survey(federation([0], [0, 1], [1, 1, 1])))
    assert [line.split()[:2] for line in report.splitlines()[-3:]] == [["2", "3"], ["1", "2"], ["0", "1"]]


def test_the_columns_of_the_report_are_aligned():
    report = describe(survey(federation([0] * 12345, [1], test=[samples([0])])))
    lines = report.splitlines()
    assert len({len(line) for line in lines[1:4]}) == 1
    assert len({len(line) for line in lines[-3:]}) == 1


def test_a_description_comes_first_and_into_the_titles_of_the_figures():
    data = images(torch.rand(4, 28, 28))
    data.description = "generated, not real"
    found = survey(data)
    assert describe(found).startswith("generated, not real\n")
    for figure in (histograms(found), contact_sheet(data)):
        assert figure.get_suptitle() == "generated, not real"


# -- figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[3], [3, 3], [1, 1, 1, 500], list(range(1, 2 * MAX_ROWS))], ids=len)
def test_histograms_are_drawn_of_any_sizes(sizes, tmp_path):
    figure = histograms(survey(federation(*([n % 7] * n for n in sizes))))
    figure.savefig(tmp_path / "clients.png")
    heat = np.asarray(figure.axes[2].images[0].get_array())
    assert heat.shape[0] == min(len(sizes), MAX_ROWS)
    assert heat.sum(axis=1) == pytest.approx(np.ones(len(heat)))


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((28, 28), (28, 28)),
        ((1, 28, 20), (28, 20)),
        ((3, 32, 40), (32, 40, 3)),
        ((784,), (28, 28)),
        ((64,), (8, 8)),
    ],
)
def test_a_sample_that_looks_like_an_image_is_drawn(shape, seen, tmp_path):
    assert as_image((torch.zeros(shape), 1)).shape == seen
    assert as_image({"pixels": torch.zeros(shape, dtype=torch.uint8), "label": 1}).shape == seen
    contact_sheet(images(torch.rand(3, *shape))).savefig(tmp_path / "samples.png")


@pytest.mark.parametrize("shape", [(), (0,), (60,), (49,), (28, 20), (4, 4), (2, 28, 28), (3, 4, 28), (1, 1, 28, 28)])
def test_other_samples_have_no_contact_sheet(shape):
    assert contact_sheet(images(torch.rand(3, *shape))) is None


def test_tokens_are_no_image():
    assert as_image((torch.zeros(64, dtype=torch.int64), 1)) is None


def test_a_contact_sheet_has_one_row_per_client_and_a_label_per_image():
    data = FederatedDataModule({f"c{i}": samples_of(n) for i, n in enumerate([2, 50, 5])})
    (axes,) = contact_sheet(data, clients=2, per_client=4).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["c0", "c2"]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "0", "1", "3", "4"]
    assert len(axes.images) == 6


def samples_of(n):
    return TensorDataset(torch.rand(n, 784), torch.arange(n))


def test_figures_call_classes_by_their_names():
    data = FederatedDataModule({f"c{i}": samples_of(3) for i in range(2)})
    data.class_names = ("$a", "b")  # the third class has no name
    (axes,) = contact_sheet(data).axes
    assert [text.get_text() for text in axes.texts] == ["$a", "b", "2"] * 2
    assert survey(data).labels.names == ["$a", "b", 2]
    shares = histograms(survey(data)).axes[2]
    assert [tick.get_text() for tick in shares.get_xticklabels()] == ["$a", "b", "2"]


def test_contact_sheet_of_femnist_shows_characters():
    from lightning_fed.datamodules import FEMNIST

    data = FEMNIST()
    data.prepare_data()
    data.setup("fit")
    texts = {text.get_text() for text in contact_sheet(data).axes[0].texts}
    assert texts <= set(FEMNIST.class_names)
    assert any(text.isalpha() for text in texts)
