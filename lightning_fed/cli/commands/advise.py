"""``lightning-fed advise --config configs/....yaml``: recommend penalty, step size and local work."""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import textwrap
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_fed.cli.main import FederatedCLI, build
from lightning_fed.cli.refusals import OneLineParser
from lightning_fed.core.algorithm import hyper_parameters
from lightning_fed.core.layout import Layout, clones, overwrite, parameters_of
from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator, torch_generator
from lightning_fed.evaluation.curvature import client_curvature
from lightning_fed.evaluation.evaluate import check_differentiable, client_gradient
from lightning_fed.lightning import ArgsType, LightningArgumentParser, pl
from lightning_fed.local.schedule import planned_steps
from lightning_fed.server import FederatedServer
from lightning_fed.theory.advice import Advice, CurvatureRange, advise
from lightning_fed.trainer.eligibility import plain_lr

USAGE = "lightning-fed advise --config FILE [options of fit] [--clients N] [--steps N] [--json]"
DESCRIPTION = """\
Measure the curvature of some clients' losses, at the first model and after a few gradient steps, and recommend penalty,
relaxation, step size and local steps, each with its reason. Takes the config files and overrides of `lightning-fed
fit`; nothing is trained, logged or written."""

#: Replaces the config's settings, so that nothing but the measurement runs.
QUIET: dict[str, Any] = {
    "logger": False,
    "callbacks": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "profiler": None,
    "min_epochs": None,
    "min_steps": None,
    "max_epochs": 1,
    "max_steps": -1,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


class AdviseCLI(FederatedCLI):
    """Builds the objects of ``fit``, without loggers, callbacks and checkpoints."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.prog, parser.usage = "lightning-fed advise", USAGE
        super().add_core_arguments_to_parser(parser)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(pl.Trainer, "fit", skip=self.subcommands()["fit"])  # ckpt_path and the like

    def read_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # main gives a list

    def before_instantiate_classes(self) -> None:
        self.save_config_callback = None
        for name, value in QUIET.items():
            self.config.trainer[name] = value


@dataclass(frozen=True)
class Measured:
    """What :class:`Surveyor` has measured.

    Args:
        clients: number of clients that were measured.
        of: number of clients of the federation.
        samples: least and largest number of training samples of a client.
        parameters: number of the model's parameters.
        curvature: of the measured clients' losses.
    """

    clients: int
    of: int
    samples: tuple[int, int]
    parameters: int
    curvature: CurvatureRange

    def facts(self) -> dict[str, Any]:
        """Everything in one mapping, for JSON."""
        own, curvature = asdict(self), asdict(self.curvature)
        del own["curvature"]
        names = ("lowest", "at_start", "later", "steps", "method")
        return {**own, "L": self.curvature.L, **{name: curvature[name] for name in names}}


class Surveyor(pl.Callback):
    """Measures before the first round, and then ends the fit."""

    def __init__(self, clients: int, steps: int) -> None:
        self.clients, self.steps = clients, steps
        self.measured: Measured | None = None
        self.local_steps = 0
        self.lr: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_differentiable(pl_module, "choose another model: there is nothing to measure")
        server, data = trainer.fit_loop.server, trainer.datamodule
        ids = data.client_ids
        drawn = numpy_generator(server.seed, "advise").choice(len(ids), min(self.clients, len(ids)), replace=False)
        self.measured = self._measure(trainer, [ids[i] for i in sorted(drawn)])
        self.local_steps = round(statistics.median(planned_steps(trainer, server.local_work, cid) for cid in ids))
        self.lr = plain_lr(trainer.optimizers)
        trainer.should_stop = True

    def _measure(self, trainer: pl.Trainer, chosen: list[ClientId]) -> Measured:
        module, data = trainer.lightning_module, trainer.datamodule
        layout, parameters = Layout.of(module, trainer.fit_loop.server.personal), parameters_of(module)
        first = clones(parameters)
        try:
            here = self._curvatures(trainer, layout, chosen)
            L = max(curvature.L for curvature in here)
            if not 0 < L < math.inf:
                raise ValueError(
                    f"The curvature of {type(module).__name__}'s loss is {L:g} at its first model, so no advice"
                    " can be given. Check whether the loss is linear, or not finite."
                )
            for _ in range(self.steps):
                slope = torch.stack([client_gradient(trainer, layout, cid) for cid in chosen]).mean(0)
                overwrite(parameters, layout.split(layout.flatten(parameters) - slope / L))
            there = self._curvatures(trainer, layout, chosen) if self.steps else here
        finally:
            overwrite(parameters, first)
        samples = [data.num_examples(cid) for cid in data.client_ids]
        return Measured(
            clients=len(chosen),
            of=len(samples),
            samples=(min(samples), max(samples)),
            parameters=layout.numel,
            curvature=CurvatureRange(
                at_start=L,
                later=max(curvature.L for curvature in there),
                steps=self.steps,
                lowest=min(curvature.lowest for curvature in here + there),
                method="differences" if any(c.method == "differences" for c in here + there) else "hessian",
            ),
        )

    def _curvatures(self, trainer: pl.Trainer, layout: Layout, chosen: list[ClientId]) -> list[Any]:
        seed = trainer.fit_loop.server.seed
        return [
            client_curvature(
                trainer,
                layout,
                cid,
                torch_generator(seed, "advise", cid),
                iterations=50,
                tolerance=1e-3,
                lowest=True,
            )
            for cid in chosen
        ]


def main(args: list[str] | None = None) -> None:
    """Measure, and print the recommendations."""
    parser = OneLineParser(prog="lightning-fed advise", usage=USAGE, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--clients", type=_whole, default=5, help="number of clients to measure, drawn by the seed (default: 5)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="number of gradient steps to the second point (default: 10)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument_group("options of fit", "--config FILE, --federated.algorithm.eta=VALUE and all others")
    options, others = parser.parse_known_args(sys.argv[2:] if args is None else args)
    if options.steps < 0:
        parser.error(f"argument --steps: must be a whole number >= 0, got {options.steps}")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    cli = build(others, cli=AdviseCLI, run=False)
    surveyor = Surveyor(options.clients, options.steps)
    server = next(callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedServer))
    server.evaluate_every, server.figure = 0, False
    cli.trainer.callbacks.append(surveyor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the advice contains the warnings of fit
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert surveyor.measured is not None
    found = advise(surveyor.measured.curvature, server.algorithm, surveyor.lr, surveyor.local_steps)
    print(_as_json(surveyor.measured, server, found) if options.json else report(surveyor.measured, server, found))


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def report(measured: Measured, server: FederatedServer, found: list[Advice]) -> str:
    """The recommendations as text."""
    curvature = measured.curvature
    by = "power iteration" if curvature.method == "hessian" else "differences of gradients: no second derivative"
    lowest = "unknown" if math.isnan(curvature.lowest) else f"{curvature.lowest:.4g}"
    low, high = measured.samples
    lines = [
        f"{type(server.algorithm).__name__}, {measured.parameters} parameters, {measured.of} clients of {low} to {high}"
        " samples",
        f"Measured on {measured.clients} clients ({by}): L = {curvature.at_start:.4g} at the first model,"
        f" {curvature.later:.4g} after {curvature.steps} gradient steps; lowest curvature {lowest}.",
        "",
        f"{'':14}{'now':>10}{'advised':>10}  verdict",
    ]
    for advice in found:
        lines.append(f"{advice.setting:14}{_short(advice.now):>10}{_short(advice.advised):>10}  {advice.verdict}")
        lines += textwrap.wrap(advice.reason, 100, initial_indent=" " * 16, subsequent_indent=" " * 16)
    return "\n".join(lines)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _as_json(measured: Measured, server: FederatedServer, found: list[Advice]) -> str:
    facts = {name: None if value != value else value for name, value in measured.facts().items()}
    settings = {advice.setting: {k: v for k, v in asdict(advice).items() if k != "setting"} for advice in found}
    content = {"algorithm": hyper_parameters(server.algorithm), "measured": facts, "advice": settings}
    return json.dumps(content, indent=2, default=str)
