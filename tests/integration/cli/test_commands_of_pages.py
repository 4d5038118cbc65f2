"""Commands that README and docs show are understood: every option exists, every value has its type."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.cli import COMMANDS, main
from lightning_fed.cli.bases import BaseParser

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "tutorials").glob("*.md"))
OF_THE_READER = {"experiment.yaml", "mine.yaml", "advised.yaml", "FILE", "runs/tune/best.yaml"}  # files of the reader


class Understood(BaseException):
    """A parser has read all that it knows; ``others`` are for Lightning's parser."""

    def __init__(self, others: list[str]) -> None:
        self.others = others


def commands() -> list[str]:
    """What follows ``lightning-fed`` in code blocks and in the text, without placeholders for several words."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M):
            lines = block.replace("\\\n", " ").replace("$seed", "0").splitlines()
            found += [part for line in lines for part in re.split(r"&&", re.sub(r"\s#.*", "", line))]
        found += re.findall(r"`(lightning-fed [^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    known = {" ".join(part.split()) for part in found if part.strip().startswith("lightning-fed ")}
    return sorted(part for part in known if "--" in part and "..." not in part and "|" not in part)


def words(command: str) -> list[str]:
    given = shlex.split(command)[1:]
    return ["configs/synthetic_fedadmm.yaml" if word in OF_THE_READER else word for word in given]


@pytest.fixture(autouse=True)
def _parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    parse, depth = argparse.ArgumentParser.parse_known_args, [0]

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, BaseParser):  # of Lightning's command line, which ends after --print_config
            return parse(self, *args, **kwargs)
        depth[0] += 1
        try:
            asked, others = parse(self, *args, **kwargs)
        finally:
            depth[0] -= 1
        if depth[0]:  # a command of a command
            return asked, others
        raise Understood(others)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says against a command; nothing is run."""
    name, *others = words(command)
    if name in COMMANDS:
        with pytest.raises((Understood, SystemExit)) as ended:
            main([name, *others])
        if isinstance(ended.value, SystemExit):
            return capsys.readouterr().err
        others = ended.value.others
        if name not in ("advise", "data", "deploy", "tune"):
            return f"unknown: {others}" if others else ""
        name = "fit"
        if not any(word.startswith("--data") for word in others) and "--config" not in others:
            return f"unknown: {others}" if others else ""
    if name == "fit" and "--config" not in others:
        others += ["--config", "configs/synthetic_fedadmm.yaml"]
    with pytest.raises(SystemExit) as end:
        main([name, *others, *([] if "--print_config" in others else ["--print_config"])])
    printed = capsys.readouterr()
    return "" if not end.value.code else printed.err


def test_every_command_on_a_page_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    shown = commands()
    assert len(shown) > 20
    refused = {command: text for command in shown if (text := refusal(command, capsys))}
    assert refused == {}


@pytest.mark.parametrize(
    "command",
    [
        "lightning-fed fit --config configs/synthetic_fedadmm.yaml --federated.eta=0.5",
        "lightning-fed advise --config configs/synthetic_fedadmm.yaml --no-trail",
        "lightning-fed compare --quik",
        "lightning-fed deploy local --nodes three --config configs/synthetic_fedadmm.yaml",
        "lightning-fed deploy admit fed-server hospital-1 node.pub --ids hospital-1",
        "lightning-fed checkpoint inspec FILE",
    ],
)
def test_a_wrong_command_is_found(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(command, capsys)
