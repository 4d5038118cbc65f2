"""The bar shows round, client, step and loss; other bars are left alone. Files get a line per round."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from pytorch_lightning.callbacks.progress.rich_progress import CustomProgress, RichProgressBarTheme
from pytorch_lightning.loggers import CSVLogger
from rich.console import Console
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, FedDR
from lightning_fed.callbacks import FederatedProgressBar, FederatedRichProgressBar
from lightning_fed.sampling import Bernoulli, Sampler


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the output look like a terminal."""
    for module in ("progress", "defaults"):
        monkeypatch.setattr(f"lightning_fed.callbacks.{module}.is_screen", lambda: True)


def fit(rounds: int = 3, sampler: Sampler | None = None, algorithm: Any = None, **kwargs: Any) -> pl.Trainer:
    cohort = {"sampler": sampler} if sampler else {"clients_per_round": 2}
    server = FederatedServer(algorithm or FedADMM(), local_steps=5, seed=0, **cohort)
    module = kwargs.pop("module", None) or Net()
    callbacks = kwargs.pop("callbacks", [])
    if kwargs.get("enable_progress_bar", True) and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks = [*callbacks, TQDMProgressBar()]  # Lightning's own default depends on whether rich is installed
    trainer = quiet_trainer(server, rounds, **{"enable_progress_bar": True, "callbacks": callbacks, **kwargs})
    trainer.fit(module, datamodule=classification())
    return trainer


def bars_of(trainer: pl.Trainer) -> list[ProgressBar]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ProgressBar)]


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str], terminal: None) -> Any:
    """What was printed on a terminal: carriage returns are lines."""

    def read() -> list[str]:
        captured = capsys.readouterr()
        return [line for line in re.split(r"[\r\n]", captured.out + captured.err) if line.strip()]

    return read


def test_the_stock_bar_is_replaced() -> None:
    trainer = fit()
    assert [type(bar) for bar in bars_of(trainer)] == [FederatedProgressBar]
    assert isinstance(trainer.progress_bar_callback, FederatedProgressBar)


def test_the_bar_shows_the_round_of_all_rounds(screen: Any) -> None:
    fit(rounds=3)
    shown = screen()
    for k in (1, 2, 3):
        assert any(f"Round {k}/3" in line for line in shown), k
    assert not any("Round 4" in line or "Round 0" in line for line in shown)
    assert not any("Epoch" in line for line in shown)


def test_the_bar_shows_client_step_and_loss(screen: Any) -> None:
    noted: list[float] = []

    class Noted(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.training:
                noted.append(float(loss.detach()))
            return loss

    trainer = fit(rounds=1, module=Noted())
    lines = [line for line in screen() if "Round 1/1" in line]
    cohort = trainer.fit_loop.server.report.cohort
    for cid, last in zip(cohort, noted[4::5], strict=True):
        assert any(f"client {cid}, step 5/5, loss {last:.4g}" in line for line in lines)
    strangers = set(trainer.datamodule.client_ids) - set(cohort)
    assert not any(f"client {cid}" in line for line in lines for cid in strangers)


def test_the_bar_counts_the_clients_of_the_round(screen: Any) -> None:
    fit(rounds=2)
    lines = [line for line in screen() if "Round 2/2" in line]
    assert any("1/2 [" in line for line in lines)
    assert any("2/2 [" in line for line in lines)


def test_the_bar_shows_the_objective_at_the_end_of_a_round(screen: Any) -> None:
    trainer = fit(rounds=1)
    objective = float(trainer.callback_metrics["federated/objective"])
    assert any(f"objective={objective:.4g}" in line for line in screen())


def test_rounds_are_counted_by_max_steps_too(screen: Any) -> None:
    fit(rounds=-1, max_steps=2)
    shown = screen()
    assert any("Round 2/2" in line for line in shown)


def test_rounds_without_a_limit_have_a_question_mark(screen: Any) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.should_stop = True

    fit(rounds=-1, callbacks=[Stop()])
    assert any("Round 1/?" in line for line in screen())


def test_empty_rounds_are_shown(screen: Any) -> None:
    trainer = fit(rounds=4, sampler=Bernoulli(0.05))
    shown = screen()
    assert all(any(f"Round {k}/4" in line for line in shown) for k in range(1, 5))
    assert trainer.global_step == 4


def test_a_start_that_asks_everybody_is_shown(screen: Any) -> None:
    fit(rounds=1, algorithm=FedDR(init="prox"))
    lines = screen()
    assert all(any(f"client c{i}, step 5/5" in line for line in lines) for i in range(4))


def test_validation_has_its_bar(screen: Any) -> None:
    fit(rounds=2)
    assert any("Validation" in line for line in screen())


def test_a_second_fit_counts_on(screen: Any) -> None:
    trainer = fit(rounds=1)
    screen()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, datamodule=trainer.datamodule)
    lines = screen()
    assert any("Round 2/2" in line for line in lines)
    assert len(bars_of(trainer)) == 1


def test_a_rich_bar_stays_a_rich_bar(screen: Any) -> None:
    pytest.importorskip("rich")
    theme, console = RichProgressBarTheme(metrics="red"), {"force_terminal": True, "width": 200}
    chosen = RichProgressBar(refresh_rate=7, leave=True, theme=theme, console_kwargs=console)
    trainer = fit(2, callbacks=[chosen])
    (bar,) = bars_of(trainer)
    assert isinstance(bar, FederatedRichProgressBar)
    assert isinstance(bar, RichProgressBar)
    assert (bar.refresh_rate, bar._leave, bar.theme, bar._console_kwargs) == (7, True, theme, console)
    task = bar.train_progress_bar
    assert (task.completed, task.total) == (2, 2)
    shown = "".join(screen())
    assert all(f"Round {k}/2" in shown for k in (1, 2))
    assert f"objective: {float(trainer.callback_metrics['federated/objective']):.4g}" in shown
    assert "Epoch" not in shown


def test_a_label_is_no_markup_of_rich(terminal: None) -> None:
    pytest.importorskip("rich")
    bar = FederatedRichProgressBar()
    fit(1, callbacks=[bar])
    bar.show("client [red], step 1")
    assert bar.train_progress_bar.description == r"Round 1/1, client \[red], step 1"


# -- messages, and outputs that are no terminals -------------------------------------------------------------------


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_file_gets_one_line_per_round(bar: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trainer = fit(3, callbacks=[bar()], logger=CSVLogger(tmp_path))
    assert [type(shown) for shown in bars_of(trainer)] == [FederatedProgressBar]
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"Round {k}/3: 2 clients" for k in (1, 2, 3)]
    assert f"objective={float(trainer.callback_metrics['federated/objective']):.4g}" in lines[-1]
    assert "v_num" not in captured.out
    assert "\r" not in captured.out + captured.err
    assert "Round" not in captured.err


def test_a_silent_bar_is_silent_in_files_too(capsys: pytest.CaptureFixture[str]) -> None:
    fit(2, callbacks=[TQDMProgressBar(refresh_rate=0)])
    assert "Round" not in capsys.readouterr().out


class Talks(pl.Callback):
    """Logs and warns in the middle of a round."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def on_client_end(self, *_: Any) -> None:
        self.logger.warning("a log line")
        warnings.warn("a warning", stacklevel=2)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.filterwarnings("always:a warning")
def test_messages_have_lines_of_their_own(
    bar: Any, terminal: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output and error are one terminal: what a line shows after its last carriage return."""

    def before(message: Any, *_: Any, **__: Any) -> None:
        print(message, file=sys.stderr)

    monkeypatch.setattr(warnings, "showwarning", before)
    logger = logging.getLogger("test_progress")
    with (tmp_path / "screen").open("w") as screen, redirect_stdout(screen), redirect_stderr(screen):
        handler = logging.StreamHandler(screen)
        logger.addHandler(handler)
        try:
            options = {"console_kwargs": {"force_terminal": True}} if bar is RichProgressBar else {}
            fit(1, callbacks=[bar(**options), Talks(logger)])
            assert (logger.handlers, handler.stream, warnings.showwarning) == ([handler], screen, before)
        finally:
            logger.removeHandler(handler)
    lines = re.split(r"[\r\n]|\x1b\[2K", (tmp_path / "screen").read_text())
    spoken = [line for line in lines if "a log line" in line or "a warning" in line]
    assert spoken == ["a log line", "a warning"] * 2


def test_the_rich_bar_counts_the_speed_of_a_stack_from_the_beginning_of_the_round() -> None:
    now = 0.0
    bar = FederatedRichProgressBar()
    bar.progress = progress = CustomProgress(get_time=lambda: now, console=Console(quiet=True))
    bar.train_progress_bar_id = progress.add_task("")
    for k in range(2):
        bar.begin_round(f"Round {k}", visits=6)
        now += 3.0
        for _ in range(6):
            bar.advance()
        assert progress.tasks[0].speed == pytest.approx(2.0)


def test_a_stock_bar_with_settings_keeps_them() -> None:
    trainer = fit(1, callbacks=[TQDMProgressBar(refresh_rate=3, process_position=2, leave=True)])
    (bar,) = bars_of(trainer)
    assert isinstance(bar, FederatedProgressBar)
    assert (bar.refresh_rate, bar.process_position, bar._leave) == (3, 2, True)


def test_a_bar_that_is_to_be_left_is_left_for_every_round(capsys: pytest.CaptureFixture[str], terminal: None) -> None:
    fit(3, callbacks=[FederatedProgressBar(leave=True)], limit_val_batches=0)
    captured = capsys.readouterr()
    left = [line.split("\r")[-1] for line in (captured.out + captured.err).split("\n")]
    assert [k for k in (1, 2, 3) if any(f"Round {k}/3: 100%" in line for line in left)] == [1, 2, 3]


def test_a_bar_with_refresh_rate_zero_is_silent(screen: Any) -> None:
    trainer = fit(2, callbacks=[TQDMProgressBar(refresh_rate=0)])
    assert trainer.global_step == 2
    assert not any("Round" in line for line in screen())


def test_the_users_own_kind_of_bar_is_left_alone(screen: Any) -> None:
    class Mine(TQDMProgressBar):
        pass

    class Plain(ProgressBar):
        def disable(self) -> None:
            pass

    for bar in (Mine(), Plain()):
        trainer = fit(2, callbacks=[bar])
        assert bars_of(trainer) == [bar]
        assert trainer.global_step == 2


def test_the_users_own_federated_bar_is_left_alone(screen: Any) -> None:
    bar = FederatedProgressBar(refresh_rate=2)
    assert bars_of(fit(1, callbacks=[bar])) == [bar]
    assert any("Round 1/1" in line for line in screen())


def test_no_bar_is_added_where_there_is_none(screen: Any) -> None:
    trainer = fit(2, enable_progress_bar=False)
    assert bars_of(trainer) == []
    assert not any("Round" in line for line in screen())


def test_validate_and_test_work_with_the_replaced_bar(screen: Any) -> None:
    trainer = fit(1)
    screen()
    trainer.validate(trainer.lightning_module, datamodule=trainer.datamodule, verbose=False)
    trainer.test(trainer.lightning_module, datamodule=trainer.datamodule, verbose=False)
    lines = screen()
    assert any("Validation" in line for line in lines)
    assert any("Testing" in line for line in lines)
