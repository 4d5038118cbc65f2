"""FedJAX's FedAvg, its steps compiled."""

from __future__ import annotations

from collections.abc import Callable

import fedjax
import jax
import numpy as np
from fedjax.algorithms import fed_avg
from jax import Array
from jax.example_libraries import stax
from workloads import Workload


def network(model: str) -> tuple[Callable[..., object], Callable[..., Array]]:
    """Initialisation and application."""
    if model == "mlp":
        layers = [stax.Dense(32), stax.Relu, stax.Dense(10)]
    else:
        pooled = [stax.Relu, stax.MaxPool((2, 2), strides=(2, 2))]
        convolutions = [stax.Conv(32, (5, 5), padding="SAME"), *pooled, stax.Conv(64, (5, 5), padding="SAME"), *pooled]
        layers = [*convolutions, stax.Flatten, stax.Dense(2048), stax.Relu, stax.Dense(62)]
    init, apply = stax.serial(*layers)
    return init, apply


def run(workload: Workload, turn: Callable[[], None]) -> None:
    jax.tree_map = jax.tree_util.tree_map  # a name that jax has dropped and FedJAX 0.0.17 uses
    init, apply = network(workload.model)
    last = workload.sample if workload.model == "mlp" else (28, 28, 1)
    data = {
        i: fedjax.ClientDataset({"x": x.reshape(-1, *last), "y": y.astype(np.int32)})
        for i, (x, y) in enumerate(workload.data())
    }

    def loss(params: object, batch: dict[str, Array], rng: Array) -> Array:
        scores = jax.nn.log_softmax(apply(params, batch["x"]))
        return -jax.numpy.take_along_axis(scores, batch["y"][:, None], axis=1)[:, 0]

    algorithm = fed_avg.federated_averaging(
        grad_fn=fedjax.grad(loss),
        client_optimizer=fedjax.optimizers.sgd(workload.lr),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=workload.batch, num_epochs=None, num_steps=workload.steps, drop_remainder=True
        ),
    )
    key = jax.random.PRNGKey(0)
    state = algorithm.init(init(key, (-1, *last))[1])
    rng = np.random.default_rng(0)
    while True:
        turn()
        chosen = rng.choice(workload.clients, workload.cohort, replace=False).tolist()
        keys = jax.random.split(key, len(chosen) + 1)
        key = keys[0]
        state, _ = algorithm.apply(state, [(i, data[i], k) for i, k in zip(chosen, keys[1:], strict=True)])
        jax.block_until_ready(state.params)
