"""Clients' personal parts in evaluations: the model that a client would use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_fed.core.layout import Layout, buffers_of, clones
from lightning_fed.core.memory import ClientId
from lightning_fed.evaluation.by_sample import Models
from lightning_fed.lightning import pl
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.trainer.module_state import restore_state

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation


def personal_part(trainer: pl.Trainer, cid: ClientId) -> dict[str, Tensor]:
    """The parameters and buffers that a client has instead of the server's; none if the fit has no personal parts."""
    federation = federation_of(trainer)
    return {} if federation is None else federation.part_of(cid)


@contextmanager
def as_client(trainer: pl.Trainer, cid: ClientId) -> Iterator[None]:
    """Hold a client's personal part in the module inside a with block."""
    module, part = trainer.lightning_module, personal_part(trainer, cid)
    if not part:
        yield
        return
    before = clones(federation_of(trainer).personal.part_of(module))
    restore_state(module, {**buffers_of(module), **part})
    try:
        yield
    finally:
        restore_state(module, {**buffers_of(module), **before})


def test_batches(trainer: pl.Trainer) -> Iterator[Any]:
    """All clients' test batches; where there are personal parts, the module holds that of a batch's client."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    federation = federation_of(trainer)
    if federation is None or not federation.first:
        yield from data.test_dataloader()
        return
    for cid in data.split_ids("test"):
        with as_client(trainer, cid):
            yield from data.client_eval_dataloader(cid, "test")


def personal_models(federation: Federation, shared: Callable[[ClientId], Mapping[str, Tensor] | None]) -> Models:
    """Models of clients: parameters that ``shared`` gives for a client, if it has any, and its personal part."""

    def recall(cid: ClientId) -> Tensor | None:
        if mixed:
            raise UnfitError("parameters have different precisions")
        found = shared(cid)
        return None if found is None else whole.flatten({**found, **federation.part_of(cid)})

    names = [*federation.layout.names, *(name for name in federation.first if name in federation.parameters)]
    whole = Layout.select(federation.parameters, names)
    mixed = bool(federation.first) and any(federation.parameters[name][1] != whole.dtype for name in names)
    return Models(whole, recall)


def federation_of(trainer: pl.Trainer) -> Any:
    """The federation of a federated fit; None if there is none yet."""
    server = getattr(trainer.fit_loop, "server", None)
    return None if server is None else server.federation
