"""Steps of many clients in C against the same steps in torch, what is refused, and what is compiled."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.c_steps import Step, agree, each_precision, in_c, needs_compiler
from torch import Tensor

from lightning_fed.core import compiler as build
from lightning_fed.local.native.codegen.lowering import NoCodeError
from lightning_fed.local.native.codegen.program import Steps
from lightning_fed.local.native.threads import spread
from lightning_fed.local.stacked.recorder import Graphs


def refused(step: Step, *inputs: Tensor) -> None:
    with pytest.raises(NoCodeError):
        Steps(step, [torch.zeros(1, 4, dtype=torch.float64)], [], inputs)


def perceptron(x: Tensor, offset: Tensor, scale: Tensor, length: Tensor, rows: Tensor, labels: Tensor) -> list[Tensor]:
    """A step of a small classifier; its labels are one-hot."""

    def loss(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.tanh(rows @ (w * scale).t()) @ v.t()
        return -(scores.log_softmax(1) * labels).sum(1).mean(), scores

    w, v = x[0, :20].view(4, 5), x[0, 20:].view(3, 4)
    slopes, scores = torch.func.grad(loss, (0, 1), has_aux=True)(w, v)
    slope = torch.cat([part.reshape(1, -1) for part in slopes], 1)
    return [x - length * (slope + 0.1 * (x - offset)), loss(w, v)[0], scores, scores.amax(1, keepdim=True) == scores]


def classes(m: int, steps: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    rows = torch.randn(m * steps, 7, 5, dtype=dtype)
    labels = torch.eye(3, dtype=dtype)[torch.randint(3, (m * steps, 7))]
    client = [torch.randn(m, 32, dtype=dtype), torch.randn(m, 32, dtype=dtype)]
    return client, [torch.rand(5, dtype=dtype)], [torch.rand(m * steps, dtype=dtype), rows, labels]


@needs_compiler
@each_precision
@pytest.mark.parametrize(("m", "steps"), [(1, 1), (1, 5), (4, 1), (5, 4)])
def test_steps_of_many_clients_are_those_of_each(m: int, steps: int, dtype: torch.dtype) -> None:
    agree(perceptron, *classes(m, steps, dtype))


@needs_compiler
@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [0, 0, 2], [4]])
def test_clients_may_have_different_numbers_of_steps(lengths: list[int]) -> None:
    client, shared, _ = classes(len(lengths), 1, torch.float64)
    _, _, varying = classes(1, sum(lengths), torch.float64)
    agree(perceptron, client, shared, varying, np.array(lengths))


@needs_compiler
def test_inputs_may_lie_anywhere_in_memory() -> None:
    client, shared, varying = classes(3, 4, torch.float64)
    elsewhere = [t.expand(3, 12, *t.shape[1:])[0] for t in varying]
    elsewhere[1] = varying[1].transpose(0, 2).contiguous().transpose(0, 2)
    elsewhere[0] = varying[0][:1].expand(12)
    agree(perceptron, [client[0], client[1][:1].expand(3, 32)], [shared[0][:1].expand(5)], elsewhere)


@needs_compiler
def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, results = classes(7, 3, torch.float32), []
    for threads in (1, 2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(in_c(perceptron, *problem))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@needs_compiler
def test_results_may_be_anything_a_step_has() -> None:
    captured = torch.randn(3, 4, dtype=torch.float64).t()
    unused = torch.randn(6, 2, dtype=torch.float64)

    def step(x: Tensor, a: Tensor, none: Tensor, unused: Tensor) -> list[Tensor]:
        y = a + 1
        return [x, x, x[0, 1:], a, a.t()[1:], y, y, y.t(), none, captured, captured[1], y.sum() > 0]

    varying = [torch.randn(6, 3, 4, dtype=torch.float64), torch.zeros(6, 0, 3, dtype=torch.float64), unused]
    agree(step, [torch.randn(2, 4, dtype=torch.float64)], [], varying)


@needs_compiler
def test_a_step_may_leave_nothing_but_the_model() -> None:
    agree(lambda x, a: [torch.sin(x) * a], [torch.randn(2, 3)], [], [torch.randn(8)])


@needs_compiler
def test_models_may_be_empty_or_a_single_number() -> None:
    for d in (0, 1):
        agree(lambda x, a: [x * a, x + 1], [torch.randn(2, d)], [], [torch.randn(4)])


def test_code_grows_with_the_number_of_operators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def noted(source: str) -> None:
        lengths.append(len(source))
        raise NoCodeError

    def step(x: Tensor, a: Tensor) -> list[Tensor]:
        for _ in range(12):
            x = x * x
        return [x]

    monkeypatch.setattr("lightning_fed.local.native.codegen.program.built", noted)
    refused(step, torch.zeros(4))
    assert lengths[0] < 10_000


@pytest.mark.parametrize(
    "step",
    [
        lambda x, a: [x, a.round()],
        lambda x, a: [x, torch.div(a, 3, rounding_mode="floor")],
        lambda x, a: [x, a.clamp(a - 1, a)],
        lambda x, a: [x, a.sum(dtype=torch.float32)],
        lambda x, a: [x, a.to(torch.float16)],
        lambda x, a: [x, a.long() + 1],
        lambda x, a: [x, a.long().sum()],
        lambda x, a: [x, torch.as_strided(a, (2, 2), (1, 1)) * 1],
        lambda x, a: [x, a.view(torch.int64)],
        lambda x, a: [x, a.sort()[0]],
        lambda x, a: [x, torch.sin(a.expand(300_000, 4) * 2).t() @ torch.ones(300_000, 2, dtype=a.dtype)],
    ],
    ids=[
        "unknown",
        "rounded",
        "clamp by tensors",
        "sum in another precision",
        "half",
        "sum of whole numbers",
        "total of whole numbers",
        "strides",
        "bits",
        "several results",
        "large",
    ],
)
def test_what_is_not_known_is_refused(step: Step) -> None:
    refused(step, torch.zeros(4, dtype=torch.float64))


def test_a_next_model_of_another_shape_or_type_is_refused() -> None:
    a = torch.zeros(9, 4, dtype=torch.float64)
    refused(lambda x, a: [x + a], a)
    refused(lambda x, a: [x[:, :2] * 1], a)
    refused(lambda x, a: [x > 0], a)


@pytest.mark.parametrize(
    ("step", "given"),
    [
        (lambda x, a: [x, a.add_(1)], torch.zeros(4)),
        (lambda x, a: [x.mul_(2), a], torch.zeros(4)),
        (lambda x, a: [x, torch.rand_like(a)], torch.zeros(4)),
        (lambda x, a: [x, a + 1], torch.zeros(4, dtype=torch.uint8)),
        (lambda x, a: [x, a], torch.zeros(4, dtype=torch.bfloat16)),
        (lambda x, a: [x, a], torch.zeros(4, dtype=torch.complex64)),
        (lambda x, a: [x, None], torch.zeros(4)),
        (lambda x, a: [x, a[:0].mean(1)], torch.zeros(4, 4)),
        (lambda x, a: [x, a.nonzero()], torch.zeros(4)),
    ],
    ids=["writes", "writes to the model", "random", "bytes", "bfloat16", "complex", "none", "empty", "any size"],
)
def test_steps_that_cannot_be_written_in_c_are_replayed(step: Step, given: Tensor) -> None:
    varying = [given.expand(6, *given.shape).clone()]
    assert Graphs().in_c("key", step, np.array([3, 3]), [torch.zeros(2, 4)], [], varying) is None


@needs_compiler
def test_data_without_numbers_are_no_obstacle() -> None:
    def step(x: Tensor, a: Tensor) -> list[Tensor]:
        return [x + a.sum(), x]

    # code or none, but no error
    Graphs().in_c("key", step, np.array([3, 3]), [torch.zeros(2, 4)], [], [torch.zeros(6, 3, 0)])


@needs_compiler
def test_code_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.randn(2, 4)], [], [torch.randn(6)]
    assert Graphs().in_c("key", lambda x, a: [x.sin() * a], np.array([3, 3]), *given) is not None
    monkeypatch.setattr(Steps, "__call__", lambda *_: [])
    assert Graphs().in_c("key", lambda x, a: [x.sin() * a], np.array([3, 3]), *given) is None


@pytest.mark.parametrize("text", ["exit 1", "exit 0", "echo no library > steps.so; echo no >&2; kill $$"])
def test_a_compiler_that_fails_is_no_obstacle(
    text: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cc"
    broken.write_text(f"#!/bin/sh\n{text}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises((OSError, subprocess.CalledProcessError)):
        build.built.__wrapped__(f"int failing; /* {text} */")
    step = {"exit 1": torch.sin, "exit 0": torch.cos}.get(text, torch.tanh)
    monkeypatch.setattr("lightning_fed.local.native.codegen.program.built", build.built.__wrapped__)
    given = [torch.randn(2, 4)], [], [torch.randn(6)]
    assert Graphs().in_c("key", lambda x, a: [step(x) * a], np.array([3, 3]), *given) is None
    assert not [file for file in (own_cache / "native").iterdir() if file.is_dir()]


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTNING_FED_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("lightning_fed.local.native.codegen.program.built", build.built.__wrapped__)
    given = [torch.randn(2, 4)], [], [torch.randn(6)]
    Graphs().in_c("key", lambda x, a: [x.cos() - a], np.array([3, 3]), *given)  # no error


@needs_compiler
def test_code_serves_any_number_of_clients_and_steps_however_they_lie_in_memory() -> None:
    graphs = Graphs()
    made = {
        graphs.in_c("key", lambda x, a: [x + a], np.full(m, t), [torch.ones(m, 2)], [], [torch.ones(2, m * t).t()])
        for m, t in ((1, 1), (2, 3), (5, 4))
    }
    assert len(made) == 1
    assert made != {None}


def test_interrupted_work_has_ended_before_its_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    both = threading.Barrier(2, timeout=30)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def work(first: int, last: int) -> None:
        both.wait()
        if first == 0:
            time.sleep(0.1)  # until its result is waited for
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(0.2)
        ended.append(first)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            spread(work, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(ended) == [0, 1]
