"""What has been logged in a round so far, remembered and put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_fed.lightning import pl, results_of
from lightning_fed.trainer.module_state import is_metric


class LogSnapshot:
    """Logged values and the metrics of the module, as they are now: what a visit adds to them can be taken back.

    Args:
        trainer: whose log it is.
        loose: metrics that the module refers to, but that are no parts of it.
    """

    def __init__(self, trainer: pl.Trainer, loose: Iterable[Any] = ()) -> None:
        self._results = results_of(trainer)
        self._logged = dict(self._results)
        parts = (part for metric in loose for part in metric.modules())
        metrics = [part for part in (*trainer.lightning_module.modules(), *parts) if is_metric(part)]
        self._content = [(each, _copied(vars(each))) for each in (*self._logged.values(), *metrics)]

    def restore(self) -> None:
        """Make the log what it was."""
        self._results.clear()
        dict.update(self._results, self._logged)  # past __setitem__, which would wrap the values once more
        for each, content in self._content:
            vars(each).clear()
            vars(each).update(_copied(content))


def _copied(content: dict[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in content.items()}


def _copy(value: Any) -> Any:
    """A copy that later updates in place do not reach; entries of lists and dicts are replaced, never changed."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(value) if type(value) in (list, dict, set) else value
