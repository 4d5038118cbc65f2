"""The figure of loss and accuracy by round, and the history it is drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FinalFigure
from lightning_fed.callbacks.curves import draw
from lightning_fed.lightning.package import TRAINER


def server(**kwargs: Any) -> FederatedServer:
    return FederatedServer(FedADMM(eta=1.0), **{"clients_per_round": 2, "local_steps": 3, "seed": 0, **kwargs})


def is_png(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 5000


def curves(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """Every curve of a figure by its label."""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    return {line.get_label(): list(zip(*map(list, line.get_data()), strict=True)) for line in lines}


def rounds_of(figure: FinalFigure) -> list[float]:
    return [row["round"] for row in figure.history]


def untimed(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "federated/seconds"} for row in history]


def test_a_png_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a" / "new folder" / "figure.png"
    quiet_trainer(server(), 2, callbacks=[FinalFigure(path)]).fit(Net(), datamodule=classification())
    assert is_png(path)


def test_the_default_figure_goes_to_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    quiet_trainer(server(), 2, logger=logger).fit(Net(), datamodule=classification())
    assert is_png(Path(logger.log_dir) / "federated_figure.png")


@pytest.mark.parametrize(("settings", "options"), [({"figure": False}, {}), ({}, {"fast_dev_run": True})])
def test_there_is_no_figure_when_it_is_not_wanted(
    settings: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = quiet_trainer(server(**settings), 2, logger=CSVLogger(tmp_path), **options)
    trainer.fit(Net(), datamodule=classification())
    assert not any(isinstance(callback, FinalFigure) for callback in trainer.callbacks)
    assert not list(tmp_path.rglob("*.png"))


def test_without_a_path_and_a_logger_nothing_is_drawn(tmp_path: Path) -> None:
    quiet_trainer(server(), 2).fit(Net(), datamodule=classification())
    assert not list(tmp_path.rglob("*.png"))


def test_the_history_has_one_row_per_round_with_all_metrics() -> None:
    figure = FinalFigure()
    trainer = quiet_trainer(server(), 4, callbacks=[figure])
    trainer.fit(Net(), datamodule=classification())
    assert rounds_of(figure) == [0, 1, 2, 3]
    names = {"federated/objective", "federated/test_accuracy", "federated/primal_residual", "train_loss", "val_loss"}
    assert all(names <= row.keys() for row in figure.history)
    last = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert figure.history[-1] == {"round": 3, **last}
    assert len({row["federated/objective"] for row in figure.history}) == 4


def test_rounds_that_were_not_evaluated_have_no_objective_in_the_history() -> None:
    figure = FinalFigure()
    quiet_trainer(server(evaluate_every=2), 5, callbacks=[figure]).fit(Net(), datamodule=classification())
    assert rounds_of(figure) == [0, 1, 2, 3, 4]
    assert [row["round"] for row in figure.history if "federated/objective" in row] == [1, 3, 4]


def test_rounds_that_were_not_validated_have_no_validation_in_the_history() -> None:
    figure = FinalFigure()
    trainer = quiet_trainer(server(), 5, callbacks=[figure], check_val_every_n_epoch=2)
    trainer.fit(Net(), datamodule=classification())
    assert [row["round"] for row in figure.history if "val_loss" in row] == [1, 3]


def test_the_history_survives_a_resume(tmp_path: Path) -> None:
    def fit(rounds: int, folder: Path, ckpt_path: str | None = None) -> FinalFigure:
        figure, save = FinalFigure(folder / "figure.png"), ModelCheckpoint(folder, save_last=True)
        trainer = quiet_trainer(server(), rounds, callbacks=[figure, save], enable_checkpointing=True)
        trainer.fit(Net(), datamodule=classification(), ckpt_path=ckpt_path)
        return figure

    whole = fit(5, tmp_path / "whole")
    fit(2, tmp_path / "parts")
    resumed = fit(5, tmp_path / "parts", "last")
    assert rounds_of(resumed) == [0, 1, 2, 3, 4]
    assert untimed(resumed.history) == untimed(whole.history)
    assert is_png(tmp_path / "parts" / "figure.png")


def test_the_history_of_the_default_figure_survives_a_resume(tmp_path: Path) -> None:
    def fit(rounds: int, ckpt_path: str | None = None) -> FinalFigure:
        save = ModelCheckpoint(tmp_path, save_last=True)
        trainer = quiet_trainer(
            server(), rounds, callbacks=[save], enable_checkpointing=True, logger=CSVLogger(tmp_path)
        )
        trainer.fit(Net(), datamodule=classification(), ckpt_path=ckpt_path)
        return next(callback for callback in trainer.callbacks if isinstance(callback, FinalFigure))

    fit(2)
    assert rounds_of(fit(4, "last")) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_figure_is_drawn_after_an_exception(error: type[BaseException], tmp_path: Path) -> None:
    class Failing(Net):
        """Runs out of luck in the third round."""

        def on_train_epoch_start(self) -> None:
            self.failing = self.current_epoch == 2

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.failing:
                raise error("no more luck")
            return super().training_step(batch, batch_idx)

    figure, logger = FinalFigure(tmp_path / "figure.png"), CSVLogger(tmp_path)
    trainer = quiet_trainer(server(), 5, callbacks=[figure], logger=logger)
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        trainer.fit(Failing(), datamodule=classification())
    assert rounds_of(figure) == [0, 1]
    assert is_png(tmp_path / "figure.png")
    assert is_png(Path(logger.log_dir) / "federated_figure.png")


def test_an_exception_in_the_first_round_is_not_hidden_by_the_figure(tmp_path: Path) -> None:
    class Broken(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise RuntimeError("broken from the start")

    trainer = quiet_trainer(server(), 5, callbacks=[FinalFigure(tmp_path / "figure.png")])
    with pytest.raises(RuntimeError, match="broken from the start"):
        trainer.fit(Broken(), datamodule=classification())
    assert not (tmp_path / "figure.png").exists()


def test_a_second_fit_goes_on_with_the_history() -> None:
    figure = FinalFigure()
    trainer = quiet_trainer(server(), 2, callbacks=[figure])
    module, data = Net(), classification()
    trainer.fit(module, datamodule=data)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=data)
    assert rounds_of(figure) == [0, 1, 2, 3]


def test_curves_begin_at_round_one_and_leave_out_what_is_missing() -> None:
    history = [
        {"round": 0, "federated/objective": 3.0},
        {"round": 1},
        {"round": 2, "federated/objective": 1.0, "federated/test_accuracy": 0.5},
    ]
    figure = draw(history, "A title")
    assert curves(figure) == {"objective": [(1, 3.0), (3, 1.0)], "test accuracy": [(3, 0.5)]}
    assert figure.get_suptitle() == "A title"
    assert [axes.get_xlabel() for axes in figure.axes] == ["round", "round"]


def sent(*megabytes: float) -> list[dict[str, float]]:
    """A history in which so many megabytes have been sent after the rounds."""
    names = ("federated/bytes_down", "federated/bytes_up")
    rows = [{"round": k, **dict.fromkeys(names, 5e5 * total)} for k, total in enumerate(megabytes)]
    return [{**row, "federated/objective": 1 / (1 + row["round"])} for row in rows]


@pytest.mark.parametrize("megabytes", [(2, 4, 6), (5, 7, 9)], ids=["from 0", "with a start"])
def test_megabytes_that_only_rescale_rounds_are_an_axis_and_no_panel(megabytes: tuple[float, ...]) -> None:
    figure = draw(sent(*megabytes))
    (panel,) = figure.axes
    (above,) = panel.child_axes
    assert above.get_xlabel() == "megabytes received and sent"
    panel.set_xlim(1, 3)
    figure.draw_without_rendering()
    assert above.get_xlim() == pytest.approx((megabytes[0], megabytes[2]))


def test_rounds_that_send_unlike_amounts_have_panels_by_megabytes() -> None:
    figure = draw(sent(2, 3, 6))
    assert [panel.get_xlabel() for panel in figure.axes] == ["round", "megabytes received and sent"]
    assert not any(panel.child_axes for panel in figure.axes)
    assert list(figure.axes[1].get_lines()[0].get_xdata()) == [2, 3, 6]


def test_the_figure_names_data_and_settings_and_labels_both_axes_of_every_panel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs))
    )
    data, logger = classification(val=0.2), CSVLogger(tmp_path)
    data.description = "four unlike clients"
    trainer = quiet_trainer(server(), 3, callbacks=[FinalFigure(tmp_path / "f.png")], logger=logger)
    with caplog.at_level("INFO", TRAINER):
        trainer.fit(Net(), datamodule=data)
    figure = drawn[0]
    assert figure.get_suptitle() == "FedADMM on four unlike clients"
    assert figure.get_supxlabel() == "FedADMM, 2 of 4 clients per round, 3 local steps, 3 rounds, seed 0"
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss", "accuracy"]
    assert [panel.get_xlabel() for panel in figure.axes] == ["round", "round"]
    assert {"train loss", "val loss", "test loss", "val accuracy"} <= curves(figure).keys()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Figure: ")]
    assert lines == [f"Figure: {tmp_path / 'f.png'}, {Path(logger.log_dir) / 'federated_figure.png'}"]


def test_without_evaluation_other_metrics_are_drawn() -> None:
    figure = FinalFigure()
    quiet_trainer(server(evaluate_every=0), 2, callbacks=[figure]).fit(Net(), datamodule=classification())
    assert curves(draw(figure.history))


def test_validation_data_are_drawn_where_there_are_no_test_data() -> None:
    splits = classification().splits
    figure = FinalFigure()
    data = FederatedDataModule(splits["train"], val=splits["test"], batch_size=4)
    quiet_trainer(server(), 2, callbacks=[figure]).fit(Net(), datamodule=data)
    assert {"val loss", "val accuracy"} <= curves(draw(figure.history)).keys()


def test_the_figure_changes_no_iterate(tmp_path: Path) -> None:
    def final(figure: bool) -> dict[str, Tensor]:
        module: pl.LightningModule = Net(dropout=0.5)
        trainer = quiet_trainer(server(figure=figure), 3, logger=CSVLogger(tmp_path))
        trainer.fit(module, datamodule=classification())
        return module.state_dict()

    with_it, without = final(True), final(False)
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_a_long_name_of_a_metric_does_not_push_the_panels_aside() -> None:
    name = "federated/test_" + "long_" * 30
    figure = draw([{"round": k, name: float(k)} for k in range(3)])
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    assert axes.get_position().width > 0.6
    assert len(axes.get_title()) <= 55


def test_without_evaluations_losses_are_drawn_and_counters_are_not() -> None:
    row = {"federated/bytes_down": 1e6, "federated/clients": 2.0, "federated/local_loss": 0.5, "score": 1.0}
    assert set(curves(draw([{"round": k, **row} for k in range(3)]))) == {"local loss", "score"}


def test_a_single_round_has_a_single_tick() -> None:
    figure = draw([{"round": 0, "federated/objective": 1.0}])
    FigureCanvasAgg(figure).draw()
    (low, high), ticks = figure.axes[0].get_xlim(), figure.axes[0].get_xticks()
    assert [tick for tick in ticks if low <= tick <= high] == [1]
