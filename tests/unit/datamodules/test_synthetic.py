"""synthetic-(a, b) is, number for number, the set that others train on."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_fed.datamodules import Synthetic
from lightning_fed.datamodules.synthetic import generate
from lightning_fed.models import MLP

SIZES = [
    *(1909, 171, 436, 4876, 2337, 57, 415, 90, 94, 174, 122, 1050, 300, 119, 182),
    *(156, 1133, 86, 152, 59, 50, 251, 357, 62, 5162, 52, 109, 87, 1220, 1081),
]

SETS = {
    0.0: (
        (-2.022862, 1.600238, 1.192465),
        (747, 0, 0, 0, 0, 0, 17, 980, 165, 0),
        (1219, 1062, 988, 6868, 984, 1836, 6292, 1579, 1078, 443),
    ),
    0.5: (
        (-2.359092, 1.264008, 0.856235),
        (1119, 0, 0, 1, 132, 0, 1, 439, 217, 0),
        (1382, 771, 1747, 5817, 835, 7193, 2969, 819, 358, 458),
    ),
    1.0: (
        (-2.695322, 0.927778, 0.520004),
        (581, 0, 0, 6, 1226, 0, 0, 66, 30, 0),
        (789, 1322, 1791, 2169, 1905, 10749, 2514, 598, 149, 363),
    ),
}


def counts(labels):
    return tuple(np.bincount(labels, minlength=10).tolist())


@pytest.mark.parametrize("ab", SETS)
def test_the_data_are_those_of_the_specification(ab):
    first, labels_of_first, labels_of_all = SETS[ab]
    data = generate(ab, ab)
    x, y = data["f_00000"]
    assert list(data) == [f"f_{k:05d}" for k in range(30)]
    assert [len(y_k) for _, y_k in data.values()] == SIZES
    assert sum(SIZES) == 22349
    np.testing.assert_allclose(x[0, :3], first, atol=5e-7)
    assert counts(y) == labels_of_first
    assert counts(np.concatenate([y_k for _, y_k in data.values()])) == labels_of_all


def test_a_has_no_effect_on_the_data():
    for (x, y), (x_too, y_too) in zip(generate(a=0.0).values(), generate(a=1.0).values(), strict=True):
        assert np.array_equal(x, x_too)
        assert np.array_equal(y, y_too)


def test_the_iid_set_has_one_labeller_and_centred_samples():
    data = generate(iid=True)
    rng = np.random.RandomState(0)
    rng.lognormal(4, 2, 30), rng.normal(size=30), rng.normal(size=30)
    W, b = rng.normal(size=(60, 10)), rng.normal(size=10)
    assert [len(y) for _, y in data.values()] == SIZES
    for x, y in data.values():
        assert np.array_equal((x @ W + b).argmax(axis=1), y)
        assert np.abs(x.mean(axis=0)).max() < 6 / np.sqrt(len(x))


def test_nine_tenths_of_every_client_are_for_training():
    data = Synthetic(0.5, 0.5)
    data.setup("fit")
    train = [data.num_examples(cid) for cid in data.client_ids]
    test = [len(data.client_dataset(cid, "test")) for cid in data.client_ids]
    assert (sum(train), sum(test)) == (20101, 2248)
    assert [a + b for a, b in zip(train, test, strict=True)] == SIZES
    assert train == [9 * n // 10 for n in SIZES]


def test_train_and_test_together_are_the_clients_samples():
    data = Synthetic(clients=3, dtype="float64")
    data.setup()
    for cid, (x, y) in generate(clients=3).items():
        kept = [data.client_dataset(cid, split).tensors for split in ("train", "test")]
        assert {tuple(row) for xs, _ in kept for row in xs.tolist()} == {tuple(row) for row in x.tolist()}
        assert counts(torch.cat([ys for _, ys in kept])) == counts(y)


def test_the_split_is_the_permutation_of_the_next_seed():
    data = Synthetic(clients=2, seed=7, dtype="float64")
    data.setup()
    permutations = np.random.RandomState(8)
    for cid, (x, y) in generate(clients=2, seed=7).items():
        train = permutations.permutation(len(y))[: int(0.9 * len(y))]
        features, labels = data.client_dataset(cid).tensors
        assert np.array_equal(features, x[train])
        assert np.array_equal(labels, y[train])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_samples_have_the_dtype_asked_for_and_labels_are_int64(dtype):
    data = Synthetic(clients=2, dtype=dtype)
    data.setup()
    x, y = next(iter(data.client_dataloader("f_00001")))
    assert (x.dtype, y.dtype) == (getattr(torch, dtype), torch.int64)
    assert x.shape == (2, 60)


def test_setup_twice_changes_nothing():
    data = Synthetic(clients=2)
    data.setup("fit")
    before = data.client_dataset("f_00000")
    data.setup("test")
    assert data.client_dataset("f_00000") is before


def test_hyper_parameters_are_saved():
    hparams = Synthetic(b=0.5, clients=3).hparams
    assert (hparams["b"], hparams["clients"], hparams["seed"]) == (0.5, 3, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"b": -1.0}, r"Synthetic.b must be non-negative, got -1.0"),
        ({"clients": 0}, r"Synthetic.clients must be a whole number >= 1, got 0"),
        ({"dtype": "float16"}, r"Synthetic.dtype must be one of float32, float64; got 'float16'"),
        ({"seed": -1}, r"Synthetic.seed must .*got -1"),
        ({"seed": 2**32}, r"Synthetic.seed must .*got 4294967296"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        Synthetic(**arguments)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.")
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_plain_trainer_trains_centrally_on_the_pooled_data(precision):
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=2,
        limit_train_batches=40,
        precision=precision,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = MLP(lr=0.05)
    data = Synthetic(0.0, 0.0, batch_size=32, dtype="float64" if precision == "64-true" else "float32")
    before = trainer.validate(model, datamodule=data, verbose=False)[0]
    trainer.fit(model, datamodule=data)
    after = trainer.test(model, datamodule=data, verbose=False)[0]
    assert after["test_loss"] < before["val_loss"]  # validation falls back to the test data
    assert after["test_acc"] > before["val_acc"]
