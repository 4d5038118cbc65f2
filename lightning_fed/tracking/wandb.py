"""A W&B logger that is offline without a key, and continues the run of a checkpoint."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning_fed.lightning import WandbLogger
from lightning_fed.tracking.best import BestValues
from lightning_fed.tracking.runs import read_runs, run_to_continue


class AutoWandbLogger(WandbLogger):
    """Lightning's W&B logger that works offline when there is no key, and online when there is one.

    A fit or a test that starts from a checkpoint continues the run of that checkpoint, if it has the same project and,
    where a name is given, the same name. ``resume="never"`` starts a new run; so does another ``id``. The run's summary
    has the last and the best value of each metric whose better side is known (docs/howto/wandb.md).

    Args:
        project: W&B project.
        save_dir: folder of the run's files.
        offline: whether to log offline; decided by the key if None.
        log_model: upload checkpoints as artifacts, at the end of the fit (True) or whenever one is saved ("all"). Of a
            federation, the server's model alone. Offline, ``wandb sync`` uploads them later.
        kwargs: other arguments of Lightning's ``WandbLogger``.

    >>> import tempfile
    >>> from unittest.mock import patch
    >>> with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"WANDB_MODE": "offline"}):
    ...     logger = AutoWandbLogger(project="demo", save_dir=f"{folder}/runs")  # the run itself begins with the fit
    ...     os.path.isdir(logger.save_dir)
    True
    """

    def __init__(
        self,
        project: str = "lightning-fed",
        save_dir: str = ".",
        name: str | None = None,
        offline: bool | None = None,
        log_model: Literal["all"] | bool = False,
        **kwargs: Any,
    ) -> None:
        if log_model not in (True, False, "all"):
            raise ValueError(f'AutoWandbLogger.log_model must be True, False or "all", got {log_model!r}.')
        if offline is None:
            disabled = os.environ.get("WANDB_MODE") == "disabled"
            offline = not disabled and not has_wandb_key()
            kwargs |= {"mode": "disabled"} if disabled else {}
        save_dir = os.path.abspath(save_dir)  # W&B's own process may have been started in another folder
        os.makedirs(save_dir, exist_ok=True)
        super().__init__(project=project, save_dir=save_dir, name=name, offline=offline, **kwargs)
        if self._wandb_init.get("anonymous") is None:  # Lightning passes it on, and W&B warns of a setting that is gone
            self._wandb_init.pop("anonymous", None)
        self._log_model = log_model  # not by an argument, which Lightning refuses offline
        self._first_step = 0
        self.best_values = BestValues()

    def go_on_from(self, checkpoint: Any) -> None:
        """Continue the run of a checkpoint, or the run of this logger that ``wandb.finish()`` has ended.

        Called before each fit, validation, test and prediction of a federation, with the checkpoint it starts from.
        """
        import wandb

        if self._experiment is not None:
            if wandb.run is None and not self._experiment.disabled:
                self._wandb_init["id"], self._experiment = self._experiment.id, None
            return
        runs, step = read_runs(checkpoint)
        chosen = self._wandb_init["id"] or os.environ.get("WANDB_RUN_ID")
        if chosen or wandb.run is not None or self._wandb_init["resume"] == "never":
            return
        self._wandb_init["id"] = run_to_continue(runs, self._project, self._name)
        if self._wandb_init["id"] is not None:
            self._first_step = step

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log values; those of a test in a new process belong to the round of its checkpoint, not to round 0."""
        self.best_values.define(self, metrics)
        super().log_metrics(metrics, step if step is None else max(step, self._first_step))


def has_wandb_key() -> bool:
    """Whether W&B could log in: by the mode that is set, else a key in the environment or in netrc.

    >>> from unittest.mock import patch
    >>> for mode in ("online", "offline"):
    ...     with patch.dict(os.environ, {"WANDB_MODE": mode}):
    ...         print(mode, has_wandb_key())
    online True
    offline False
    """
    if mode := os.environ.get("WANDB_MODE"):
        return mode == "online"
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        found = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    own_host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    return any("wandb" in host or host == own_host for host in found)
