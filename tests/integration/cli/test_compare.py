"""`lightning-fed compare`: counts and statistics of its table, by hand; what diverges is part of the result."""

from __future__ import annotations

import csv
import logging
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from helpers.wandb_reader import read_run

from lightning_fed import algorithms
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedAvg
from lightning_fed.cli import main
from lightning_fed.cli.experiments import comparison
from lightning_fed.cli.experiments.comparison import FAMILY, labels, markdown, marks, shown
from lightning_fed.cli.experiments.run import Recipe, Row, Run
from lightning_fed.cli.experiments.settings import parse_algorithm, synthetic
from lightning_fed.transforms import Clip, Compose, Quantize, TopK

SMALL = ["compare", "--quick", "--sets", "1", "--rounds", "2", "--only"]
MODEL = (60 * 32 + 32 + 32 * 10 + 10) * 4  # bytes of the perceptron in float32


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    level = logging.getLogger("pytorch_lightning").level
    yield
    wandb.finish()
    logging.getLogger("pytorch_lightning").setLevel(level)
    torch.set_num_threads(1)


def table(text: str) -> dict[str, dict[str, str]]:
    """The rows of the first Markdown table by algorithm."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {line[0].replace("`", ""): dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def csv_rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_algorithm_is_compared_and_every_label_is_one() -> None:
    parsed = [parse_algorithm(label) for label in labels(FAMILY)]
    inner = {type(a.algorithm if isinstance(a, Compressed) else a).__name__ for a in parsed}
    kinds = [getattr(algorithms, name) for name in algorithms.__all__]
    family = {k.__name__ for k in kinds if isinstance(k, type) and issubclass(k, Algorithm)}
    assert inner == family - {"Algorithm", "Compressed"}
    assert len(set(map(repr, parsed))) == len(parsed)


def test_table_csv_figure_and_wandb_tell_what_was_run() -> None:
    main([*SMALL, "FedAvg", "FedLin", "FedADMM+Quantize:levels=64"])
    out = Path("runs/compare/quick")
    found = table((out / "compare.md").read_text())
    assert list(found) == ["FedAvg", "FedLin", "FedADMM+Quantize:levels=64"]
    assert [row["clients"] for row in found.values()] == ["10 of 30", "all", "10 of 30"]
    assert [row["local steps"] for row in found.values()] == ["2,000", "6,000", "2,000"]
    assert [row["full gradients"] for row in found.values()] == ["0", "90", "0"]
    written = csv_rows(str(out / "compare.csv"))
    last = {row["algorithm"]: row for row in written if row["round"] == "2"}
    assert int(last["FedAvg"]["bytes_up"]) == int(last["FedAvg"]["bytes_down"]) == 2 * 10 * MODEL
    assert int(last["FedLin"]["bytes_down"]) == 2 * 30 * 2 * MODEL
    assert int(last["FedLin"]["bytes_up"]) == (2 * 2 + 1) * 30 * MODEL
    assert int(last["FedADMM+Quantize:levels=64"]["bytes_up"]) == 2 * 10 * -(-(32 + 8 * MODEL // 4) // 8)
    assert found["FedAvg"]["MB"] == f"{4 * 10 * MODEL / 1e6:.3g}"
    assert found["FedAvg"]["train loss, round 2"] == f"{float(last['FedAvg']['train_loss']):.4f}"
    assert (out / "compare.png").stat().st_size > 10_000
    report = read_run(out / "wandb")
    assert "compare/figure" in report.history[-1]
    assert (report.group, report.job_type) == ("compare", "report")
    run = read_run(out / "synthetic-(1,1)" / "FedLin" / "seed_0")
    assert run.summary["federated/bytes_up"] == 5 * 30 * MODEL
    assert run.config["federated"]["sampler"]["name"] == "Full"
    assert (run.group, run.job_type) == ("compare synthetic-(1,1) FedLin", "compare"), "one group for all seeds"
    facts = {"name": "compare", "setting": "synthetic-(1,1)", "label": "FedLin", "seed": 0}
    assert run.config["experiment"] == facts


def test_an_algorithm_that_diverges_is_told_and_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "FedAvg:server_lr=1e30", "FedAvg"])
    found = table(capsys.readouterr().out)
    assert found["FedAvg:server_lr=1e30"]["test accuracy, round 2"] == "diverged"
    assert found["FedAvg:server_lr=1e30"]["MB"] == "-"
    assert float(found["FedAvg"]["test accuracy, round 2"]) > 0
    assert not list(Path("runs").rglob("last.ckpt"))


def test_what_has_diverged_is_not_run_again_and_a_report_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, "FedAvg:server_lr=1e30"])
    first = Path("runs/compare/quick/compare.md").read_text()
    monkeypatch.setattr(Run, "go", lambda *_: pytest.fail("was run again"))
    main([*SMALL, "FedAvg:server_lr=1e30"])
    assert Path("runs/compare/quick/compare.md").read_text() == first
    main(["compare", "--quick", "--sets", "1", "--rounds", "2", "--report"])
    main(["compare", "--out", "elsewhere", "--report"])
    assert "There are no runs to report on yet." in capsys.readouterr().out


def test_only_some_rounds_are_evaluated() -> None:
    main(["compare", "--quick", "--sets", "1", "--rounds", "7", "--evaluate-every", "6", "--only", "FedAvg"])
    written = csv_rows("runs/compare/quick/compare.csv")
    assert [row["round"] for row in written if row["test_accuracy"]] == ["1", "2", "3", "6", "7"]
    assert all(row["bytes_up"] for row in written)


# -- the table, from histories written by hand ------------------------------------------------------------------


def recorded(label: str, seed: int, losses: list[float], megabytes: float = 1.0, **kwargs: Any) -> Run:
    """A run whose accuracy is half its loss."""
    run = Run(synthetic(1.0), label, parse_algorithm(label), seed, Path("out"), Recipe(rounds=3), **kwargs)
    run.folder.mkdir(parents=True)
    history: list[Row] = [
        {
            "round": k,
            "federated/train_loss": loss,
            "federated/test_accuracy": loss / 2,
            "federated/bytes_down": megabytes * (k + 1) * 1e6,
            "federated/bytes_up": 0.0,
        }
        for k, loss in enumerate(losses)
    ]
    run.record(history, None)
    return run


def test_cells_are_mean_and_standard_deviation_over_seeds() -> None:
    runs = [recorded("FedAvg", seed, [9.0, 5.0, loss]) for seed, loss in enumerate([1.0, 2.0, 4.0])]
    found = table(markdown({"FedAvg": runs}, {"FedAvg": ()}))
    wanted = f"{statistics.mean([1, 2, 4]):.4f} +- {statistics.stdev([1, 2, 4]):.4f}"
    assert found["FedAvg"]["train loss, round 3"] == wanted


def test_a_seed_that_diverged_is_counted_and_one_that_has_not_come_so_far_is_not() -> None:
    runs = [recorded("FedAvg", 0, [3.0, 2.0, 1.0]), recorded("FedAvg", 1, [3.0])]
    assert table(markdown({"FedAvg": runs}, {"FedAvg": ()}))["FedAvg"]["train loss, round 3"] == "1.0000"
    runs[1]._write_facts({"diverged": "round 1, client 0: no luck"})
    found = table(markdown({"FedAvg": runs}, {"FedAvg": ()}))
    assert found["FedAvg"]["train loss, round 3"] == "diverged (1 of 2)"


def test_accuracy_at_equal_bytes_lies_on_the_line_between_evaluations() -> None:
    lean, rich = recorded("FedPAQ", 0, [0.2, 0.4, 0.6], 1.0), recorded("FedAvg", 0, [0.2, 0.6, 1.0], 2.0)
    found = table(markdown({"FedPAQ": [lean], "FedAvg": [rich]}, {"FedPAQ": (), "FedAvg": ()}))
    assert found["FedPAQ"]["test accuracy after 3 MB"] == "0.3000"
    assert found["FedAvg"]["test accuracy after 3 MB"] == "0.2000"  # halfway between 0.1 after 2 MB and 0.3 after 4


def test_the_table_tells_the_first_round_and_the_megabytes_at_which_a_level_is_reached() -> None:
    runs = [
        recorded("FedAvg", 0, [1.0, 1.3, 1.5], 2.0),
        recorded("FedAvg", 1, [1.0, 1.1, 1.5], 2.0),
    ]  # accuracy is half
    found = table(markdown({"FedAvg": runs}, {"FedAvg": ()}))["FedAvg"]
    assert [found[f"rounds (MB) to {level}"] for level in ("60%", "70%", "80%")] == ["2 (4)", "3 (6)", "-"]


def test_the_best_of_what_was_tried_is_that_with_the_least_train_loss_in_the_end() -> None:
    tried = {"FedProx": [0.1, 0.1, 0.5], "FedProx:mu=1": [9.0, 9.0, 0.4], "FedProx:mu=0.01": [0.1, 0.1]}
    runs = {label: [recorded(label, 0, losses)] for label, losses in tried.items()}
    family = {"FedProx": ("FedProx:mu=1", "FedProx:mu=0.01")}
    assert shown(runs, family) == {"FedProx": "FedProx", "FedProx:mu=1 (best of 3)": "FedProx:mu=1"}
    del runs["FedProx:mu=1"]
    assert shown(runs, family) == {"FedProx (best of 2)": "FedProx"}
    assert [line.get_label() for line in comparison.figure({"x": runs}, family).axes[0].get_lines()] == ["FedProx"]


def test_the_table_shows_rounds_that_exist() -> None:
    assert marks(100) == [10, 50, 100]
    assert marks(60) == [10, 50, 60]
    assert marks(3) == [3]


# -- the notation ------------------------------------------------------------------------------------------------


def test_transforms_of_uploads_are_added_with_a_plus() -> None:
    assert parse_algorithm("FedADMM:eta=1e-1+Quantize:levels=4") == Compressed(FedADMM(eta=0.1), Quantize(4))
    assert parse_algorithm("FedAvg+Clip:norm=2+TopK:k=5") == Compressed(FedAvg(), Compose([Clip(2), TopK(5)]))
    assert parse_algorithm("FedADMM:eta=1e+1") == FedADMM(eta=10.0)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("FedAvg+Zip", "There is no transform 'Zip'. Choose from Clip, Quantize, TopK"),
        ("FedAvg+TopK", "TopK needs 'k', for instance TopK:k=10; got 'TopK'"),
        ("Compressed", "There is no algorithm 'Compressed'"),
        ("douglas_rachford", "There is no algorithm 'douglas_rachford'"),
        ("FedAvg+TopK:k=0", "TopK.k must be a whole number >= 1, got 0"),
    ],
)
def test_labels_that_make_no_sense_are_refused(label: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*SMALL, label])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
