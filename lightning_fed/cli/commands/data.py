"""``lightning-fed data --config configs/....yaml``: survey the data of the clients."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from jsonargparse import Namespace

from lightning_fed.cli.main import FederatedCLI, build
from lightning_fed.cli.refusals import OneLineParser
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.survey import describe, survey, table
from lightning_fed.data.survey_figures import contact_sheet, histograms
from lightning_fed.lightning import ArgsType, LightningArgumentParser, pl
from lightning_fed.server import FederatedServer

USAGE = "lightning-fed data --config FILE [--data.init_args.NAME=VALUE ...] [--out FOLDER]"
DESCRIPTION = """\
Survey the data of the clients: numbers of samples and classes, and how much the labels of clients differ. Takes the
config files and overrides of `lightning-fed fit`, but builds the data alone: nothing is trained or logged."""
EPILOG = """\
examples:
  lightning-fed data --config configs/synthetic_fedadmm.yaml
  lightning-fed data --config configs/synthetic_fedadmm.yaml --data.init_args.seed=3 --out=runs/seed3
  lightning-fed data --data=Synthetic --data.clients=5"""


class DataCLI(FederatedCLI):
    """Takes the arguments of ``fit`` and builds the data alone: a logger would make folders. Requires only ``data``."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.prog, parser.usage = "lightning-fed data", USAGE
        parser.add_lightning_class_args(pl.Trainer, "trainer")
        parser.add_lightning_class_args(pl.LightningModule, "model", subclass_mode=True, required=False)
        parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=True, required=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(FederatedServer, "federated", instantiate=False)
        parser.set_defaults({"federated.algorithm": {"class_path": "FedAvg"}})
        parser.add_method_arguments(pl.Trainer, "fit", skip=self.subcommands()["fit"])  # ckpt_path and the like

    def read_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # main gives a list
        if self.config.data is None:
            parser.error("There are no data. Give a --config with a `data:` section, or --data=CLASS.")

    def build_classes(self) -> None:
        self.datamodule = self.parser.instantiate_classes(Namespace(data=self.config.data)).data  # type: ignore[no-untyped-call]


def main(args: list[str] | None = None) -> None:
    """Print the report on a federation, and write its table and pictures."""
    parser = OneLineParser(
        prog="lightning-fed data",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/data"),
        metavar="FOLDER",
        help="folder for clients.csv, clients.png and, for images, samples.png (default: %(default)s)",
    )
    parser.add_argument_group(
        "options of fit",
        "--config FILE, any number of times; --data=CLASS; --data.init_args.NAME=VALUE; and all others",
    )
    options, others = parser.parse_known_args(sys.argv[2:] if args is None else args)
    data = build(others, cli=DataCLI, run=False).datamodule
    data.prepare_data()
    data.setup("fit")
    for path in report(data, options.out):
        print(path)


def report(data: FederatedDataModule, folder: Path) -> list[Path]:
    """Print the survey of data that are set up, and write it to ``folder``; returns the written files."""
    found = survey(data)
    print(describe(found), end="\n\n")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "clients.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table(found))
    written = [folder / "clients.csv"]
    for name, figure in {"clients.png": histograms(found), "samples.png": contact_sheet(data)}.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=120)
            written.append(folder / name)
    return written
