"""Ctrl-C and SIGTERM: every command ends at once, with the usual exit code, and says how to resume."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fed.cli.interruption import Stopped, check_interrupted, resumable, terminable
from lightning_fed.cli.main import run

CONFIG = Path(__file__).parents[3] / "configs" / "synthetic_fedadmm.yaml"
FIT = f"fit --config {CONFIG} --trainer.logger=false --federated.local_steps=5"
COMPARE = "compare --quick --only FedAvg FedProx FedADMM FedDR FedDyn --rounds 3000"  # minutes, if it went on
REPRODUCE = "reproduce synthetic --quick --rounds 3000"
TUNE = f"tune {FIT.partition(' ')[2]} --search federated.algorithm.eta=log:0.1:1 --trials 32 --rounds 800"
pytestmark = pytest.mark.filterwarnings("ignore")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def begun(command: str) -> int:
    """The process of a command; its output is in the file ``told``."""
    if pid := os.fork():
        return pid
    told = os.open("told", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(told, 1)
    os.dup2(told, 2)
    sys.stdout = sys.stderr = os.fdopen(told, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
    sys.argv, code = ["lightning-fed", *command.split()], 0
    try:
        run()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        os._exit(code)


def ended(command: str, sign: int, pattern: str) -> tuple[int, float, str]:
    """Send a signal when a file of the pattern appears: exit code, seconds that it took, last line."""
    pid, limit = begun(command), time.monotonic() + 60
    while not any(Path().glob(pattern)):
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, Path("told").read_text()
        assert time.monotonic() < limit
        time.sleep(0.01)
    began = time.monotonic()
    os.kill(pid, sign)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, time.monotonic() - began, Path("told").read_text().strip().splitlines()[-1]


@pytest.mark.parametrize("sign", CODES, ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("command", "pattern"),
    [(COMPARE, "**/FedAvg/**/rounds.csv"), (REPRODUCE, "**/rounds.csv"), (TUNE, "**/trial*/**/*.ckpt")],
    ids=["compare", "reproduce", "tune"],
)
def test_commands_of_many_fits_end_at_once(command: str, pattern: str, sign: int) -> None:
    code, seconds, last = ended(command, sign, pattern)
    assert (code, last) == (CODES[sign], "Interrupted. Repeat the command to resume.")
    assert seconds < 20  # about one, on a machine that has nothing else to do


@pytest.mark.parametrize("sign", CODES, ids=["SIGINT", "SIGTERM"])
def test_a_fit_says_from_which_checkpoint_it_goes_on(sign: int) -> None:
    code, seconds, last = ended(f"{FIT} --trainer.max_epochs=400", sign, "**/last.ckpt")
    assert code == CODES[sign]
    assert seconds < 20
    path = last.removeprefix("Interrupted. Repeat the command with --ckpt_path=").removesuffix(" to resume.")
    assert path.endswith("last.ckpt")
    assert os.waitpid(begun(f"{FIT} --trainer.max_epochs=1 --ckpt_path={path}"), 0)[1] == 0, Path("told").read_text()


def test_before_the_first_checkpoint_a_fit_says_that_it_starts_again() -> None:
    code, _, last = ended(
        f"{FIT} --trainer.max_epochs=400 --trainer.enable_checkpointing=false", signal.SIGTERM, "told"
    )
    assert code == 143
    assert last.startswith("Interrupted. ")


# -- the handler itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as above, where tests run in the background
    with terminable():
        yield
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.signal(signal.SIGINT, ignored) is signal.default_int_handler


@pytest.mark.usefixtures("handled")
def test_a_second_sigterm_does_not_disturb_the_end() -> None:
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 143


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize(("sign", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finaliser_is_not_forgotten(sign: int, raised: type[BaseException]) -> None:
    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), sign)  # Python drops what its handler raises here

    thing = Finalised()
    check_interrupted()
    del thing
    with pytest.raises(raised):
        check_interrupted()


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGINT)
            check_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handled")
def test_a_forked_worker_just_ends() -> None:
    if (pid := os.fork()) == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143


def test_what_is_said_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stopped) as stopped, resumable(), resumable(lambda: "Go on."):
        raise KeyboardInterrupt
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "\nInterrupted. Go on.\n"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_another_exit_is_no_interruption(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, resumable():
        raise SystemExit(code)
    assert stopped.value.code == code
    assert capsys.readouterr().err == ""
