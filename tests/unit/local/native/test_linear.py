"""The passes in C over a large weight against torch's own operators."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from helpers.c_steps import needs_compiler
from torch import Tensor

from lightning_fed.core.compiler import built
from lightning_fed.local.native import linear


def problem(batch: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream = torch.Generator().manual_seed(batch + rows + columns)
    weight, target = (torch.randn(rows, columns, generator=stream, dtype=dtype) for _ in range(2))
    x, slopes = (torch.randn(batch, n, generator=stream, dtype=dtype) for n in (columns, rows))
    return weight, target, x, slopes


@needs_compiler
def test_it_works_where_there_is_a_compiler() -> None:
    assert linear.defect() is None


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", range(1, 9))
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (4, 8), (7, 133), (66, 130)])
def test_all_passes_are_torchs(batch: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    weight, target, x, slopes = problem(batch, rows, columns, dtype)
    assert linear.is_for_c(weight, x)
    torch.testing.assert_close(linear.forward(weight, x), x @ weight.t())
    expected = 0.9 * weight + 0.2 * target - 0.3 * slopes.t() @ x, slopes @ weight
    found = linear.backward(weight, slopes)
    linear.move(weight, target, x, slopes, 0.9, 0.2, 0.3)
    torch.testing.assert_close((weight, found), expected)


@needs_compiler
def test_without_a_target_the_weight_only_follows_its_gradient() -> None:
    weight, _, x, slopes = problem(3, 9, 20, torch.float64)
    expected = weight - 0.3 * slopes.t() @ x
    linear.move(weight, None, x, slopes, 1.0, 0.5, 0.3)
    torch.testing.assert_close(weight, expected)


@needs_compiler
def test_rows_that_do_not_lie_one_after_another_are_read_right() -> None:
    weight, target, x, slopes = problem(4, 6, 10, torch.float64)
    moved = [weight.clone(), weight.clone()]
    strided = [t.t().contiguous().t() for t in (x, slopes)]
    assert not strided[0].is_contiguous()
    linear.move(moved[0], target, x, slopes, 0.5, 0.5, 0.1)
    linear.move(moved[1], target, *strided, 0.5, 0.5, 0.1)
    expected = linear.forward(weight, x), linear.backward(weight, slopes), moved[0]
    found = linear.forward(weight, strided[0]), linear.backward(weight, strided[1]), moved[1]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@needs_compiler
def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        weight, target, x, slopes = problem(2, 203, 331, torch.float32)
        before = linear.forward(weight, x), linear.backward(weight, slopes)
        linear.move(weight, target, x, slopes, 0.9, 0.1, 0.3)
        results.append((*before, weight))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@needs_compiler
def test_whoever_kept_the_weight_for_a_backward_of_its_own_hears_of_the_step() -> None:
    weight, target, x, slopes = problem(2, 8, 8, torch.float64)
    weight.requires_grad_()
    loss = weight.square().sum()
    with torch.no_grad():
        linear.move(weight, target, x, slopes, 0.9, 0.1, 0.3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("weight", "x"),
    [
        (torch.zeros(4, 4), torch.zeros(9, 4)),
        (torch.zeros(4, 4), torch.zeros(0, 4)),
        (torch.zeros(4, 4), torch.zeros(2, 4).double()),
        (torch.zeros(4, 4).bfloat16(), torch.zeros(2, 4).bfloat16()),
        (torch.zeros(4, 6).t(), torch.zeros(2, 4)),
        (torch.zeros(4, 4, device="meta"), torch.zeros(2, 4)),
    ],
    ids=["large batch", "no samples", "other precision", "bfloat16", "not in rows", "other device"],
)
def test_it_steps_aside(weight: Tensor, x: Tensor) -> None:
    assert not linear.is_for_c(weight, x)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Nothing is compiled yet."""
    monkeypatch.setattr(linear, "built", built.__wrapped__)
    monkeypatch.setattr(linear, "_function", linear._function.__wrapped__)


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert linear.defect.__wrapped__() == "no C compiler was found (of $CC, cc, gcc and clang)"


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    defect = str(linear.defect.__wrapped__())
    assert defect.startswith("the C compiler does not work: Command")
    assert defect.endswith("returned non-zero exit status 3.")


@needs_compiler
def test_wrong_numbers_are_noticed_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(linear, "_function", lambda name, dtype: nothing)
    assert "does not work" in str(linear.defect.__wrapped__())


@needs_compiler
@pytest.mark.usefixtures("anew")
def test_a_file_that_is_no_library_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise OSError("not a library")

    monkeypatch.setattr(ctypes, "CDLL", broken)
    assert linear.defect.__wrapped__() == "the compiled C library does not work: not a library"
