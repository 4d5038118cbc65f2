from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fed.core.validation import whole
from lightning_fed.evaluation.evaluate import measuring
from lightning_fed.evaluation.personal import test_batches
from lightning_fed.lightning import pl
from lightning_fed.tracking.figures import log_figure
from lightning_fed.tracking.tables import log_table
from lightning_fed.trainer.batches import move_batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Confusion(pl.Callback):
    """Shows at the end of the fit which classes the server's model mistakes for which, on the clients' test data.

    For classifiers: batches are ``(x, y)`` with whole-numbered y, and ``module(x)`` gives one score per class. Classes
    are named by the datamodule's ``class_names``, if it has them. Loggers get ``confusion/table`` and
    ``confusion/matrix``.

    Args:
        path: PNG file for the matrix, in addition to the loggers.
        top: number of pairs in the table.

    Add it to the trainer's callbacks; it fills ``matrix`` and ``names`` when the fit ends. Here by hand:

    >>> confusion = Confusion(top=3)
    >>> confusion.names, confusion.matrix = ["cat", "dog"], torch.tensor([[8, 2], [0, 10]])
    >>> confusion.mistakes()  # true class, taken for, how often, of how many
    [('cat', 'dog', 2, 10)]
    """

    def __init__(self, path: str | Path | None = None, top: int = 10) -> None:
        self.path = None if path is None else Path(path)
        self.top = top
        whole(self, "top", 1)
        #: how often a sample of class i (row) was taken for class j (column)
        self.matrix: Tensor | None = None
        self.names: Sequence[str] = ()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data: Any = trainer.datamodule
        if not trainer.global_step or trainer.fast_dev_run or not data.has_split("test"):
            return
        with measuring(trainer):
            found = [self._predict(trainer, batch) for batch in test_batches(trainer)]
        classes = int(max(scores.shape[1] for scores, _ in found))
        matrix = torch.zeros(classes, classes, dtype=torch.int64)
        for scores, y in found:
            matrix.index_put_((y.cpu(), scores.argmax(1).cpu()), torch.tensor(1), accumulate=True)
        self.matrix = matrix
        self.names = list(getattr(data, "class_names", ())) or [str(i) for i in range(classes)]
        step = trainer.global_step - 1
        log_table(trainer.loggers, "confusion/table", ["true", "taken for", "times", "of"], self.mistakes(), step)
        if not trainer.is_global_zero or (self.path is None and not trainer.loggers):
            return
        figure = self.draw(getattr(data, "description", ""))
        log_figure(trainer.loggers, "confusion/matrix", figure, step)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.path, dpi=120)

    def mistakes(self) -> list[tuple[str, str, int, int]]:
        """The most frequent mistakes: true class, predicted class, number of mistakes, number of samples."""
        if self.matrix is None:
            return []
        wrong = self.matrix.clone().fill_diagonal_(0)
        times, places = wrong.flatten().sort(descending=True, stable=True)
        pairs = [(int(n), *divmod(int(i), len(wrong))) for n, i in zip(times[: self.top], places, strict=False) if n]
        return [(self.names[i], self.names[j], n, int(self.matrix[i].sum())) for n, i, j in pairs]

    def draw(self, title: str) -> Figure:
        """The matrix, every row as shares of its class."""
        from matplotlib.figure import Figure

        assert self.matrix is not None
        shares = self.matrix / self.matrix.sum(1, keepdim=True).clamp(min=1)
        figure = Figure(figsize=(8, 8), layout="constrained")
        axes = figure.subplots()
        axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
        if len(self.names) <= 100:
            axes.set_xticks(range(len(self.names)), self.names, fontsize=6)
            axes.set_yticks(range(len(self.names)), self.names, fontsize=6)
        axes.set(xlabel="taken for", ylabel="true", title="\n".join(filter(None, ["Mistakes", title])))
        return figure

    def _predict(self, trainer: pl.Trainer, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise TypeError(f"Confusion needs batches (x, y), got {type(batch).__name__}. Remove it for other data.")
        x, y = move_batch(trainer, batch)
        scores = trainer.lightning_module(x)
        if not isinstance(scores, Tensor) or scores.ndim != 2 or y.is_floating_point():
            raise TypeError(
                "Confusion needs module(x) to give one score per class and y to be whole numbers; got"
                f" {getattr(scores, 'shape', type(scores).__name__)} and {y.dtype}. Remove it for other models."
            )
        return scores, y
