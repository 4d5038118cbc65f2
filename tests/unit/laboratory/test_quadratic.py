"""Clients in closed form, and the two ways to solve their problems."""

import pytest
import torch
from helpers.problems import LAW, close, federations
from hypothesis import given

from lightning_fed import Exact, GradientDescent, Quadratic
from lightning_fed.laboratory.quadratic import Oracle

F = Quadratic([[2.0, 0.5], [0.5, 1.0]], [1.0, -1.0])
X = torch.tensor([1.0, 2.0], dtype=torch.float64)
LINEAR = torch.tensor([0.3, -0.7], dtype=torch.float64)
CENTER = torch.tensor([-1.0, 4.0], dtype=torch.float64)


def test_value_and_gradient_are_those_of_the_formula():
    assert float(F(X)) == pytest.approx(0.5 * (2 + 2 * 0.5 * 2 + 4) - (1 - 2))
    close(F.grad(X), [2 + 1 - 1, 0.5 + 2 + 1], 1e-15)


@given(federations())
@LAW
def test_the_gradient_is_the_derivative_of_the_value(federation):
    clients, x0, _ = federation
    x = x0.clone().requires_grad_()
    close(torch.autograd.grad(clients[0](x), x)[0], clients[0].grad(x0), 1e-12)


def test_a_scalar_client_is_a_quadratic_in_one_dimension():
    f = Quadratic.scalar(4.0, 2.0, num_examples=3)
    assert (f.A.tolist(), f.b.tolist(), f.num_examples) == ([[4.0]], [2.0], 3)
    assert float(f.grad(torch.tensor([0.5]))) == 0.0


def test_lists_become_float64_and_tensors_keep_their_precision():
    assert F.A.dtype == F.b.dtype == torch.float64
    single = Quadratic(torch.eye(2), torch.ones(2))
    assert single.A.dtype == torch.float32
    assert single(X).dtype == single.grad(X).dtype == torch.float64
    assert F.grad(X.float()).dtype == torch.float32


@pytest.mark.parametrize(("A", "b"), [([[1.0, 0.0]], [1.0]), ([[1.0]], [1.0, 2.0]), ([1.0], [1.0]), ([[1.0]], [[1.0]])])
def test_shapes_that_do_not_fit_are_refused(A, b):
    with pytest.raises(ValueError, match=r"Quadratic needs A of shape \(d, d\) and b of shape \(d,\); got torch\.Size"):
        Quadratic(A, b)


def test_an_unsymmetric_matrix_is_refused():
    with pytest.raises(ValueError, match=r"symmetric A\. Use \(A \+ A\.T\) / 2"):
        Quadratic([[1.0, 1.0], [0.0, 1.0]], [0.0, 0.0])


@pytest.mark.parametrize("num_examples", [0, -3])
def test_a_client_without_samples_is_refused(num_examples):
    with pytest.raises(ValueError, match=rf"Quadratic\.num_examples must be a whole number >= 1, got {num_examples}"):
        Quadratic.scalar(1.0, 1.0, num_examples)


@given(federations())
@LAW
def test_the_exact_solution_has_no_slope_left(federation):
    clients, x0, _ = federation
    for f in clients:
        sol = Oracle(f, Exact()).solve(7 * x0, linear=x0, rho=3.0, center=2 * x0)
        close(f.grad(sol.x) + x0 + 3.0 * (sol.x - 2 * x0), torch.zeros_like(x0), 1e-10)
        assert sol.loss == pytest.approx(float(f(sol.x)))


def test_the_question_without_terms_is_the_plain_minimum():
    close(F.grad(Oracle(F, Exact()).solve(X).x), [0.0, 0.0], 1e-14)
    close(Oracle(F, GradientDescent(1, 0.1)).solve(X).x, X - 0.1 * F.grad(X), 1e-15)


def test_the_exact_solution_forgets_where_it_started():
    oracle = Oracle(F, Exact())
    first, second = (oracle.solve(x, linear=LINEAR, rho=1.0, center=CENTER).x for x in (X, 100 * X))
    assert torch.equal(first, second)


def test_gradient_descent_steps_on_the_whole_question():
    sol = Oracle(F, GradientDescent(2, 0.1)).solve(X, linear=LINEAR, rho=0.5, center=CENTER)
    first = X - 0.1 * (F.grad(X) + LINEAR + 0.5 * (X - CENTER))
    second = first - 0.1 * (F.grad(first) + LINEAR + 0.5 * (first - CENTER))
    close(sol.x, second, 1e-15)
    assert sol.steps == 2
    assert sol.loss == pytest.approx(float(F(X) + F(first)) / 2)


def test_many_gradient_steps_find_the_exact_solution():
    question = {"linear": LINEAR, "rho": 1.5, "center": CENTER}
    near = Oracle(F, GradientDescent(500, 0.2)).solve(X, **question).x
    close(near, Oracle(F, Exact()).solve(X, **question).x, 1e-12)


def test_a_question_without_a_unique_answer_is_refused():
    with pytest.raises(ValueError, match=r"A \+ 0\.5 I is not positive definite\. Use a penalty above"):
        Oracle(Quadratic.scalar(-1.0, 0.0), Exact()).solve(torch.zeros(1), rho=0.5)
    with pytest.raises(ValueError, match=r"A \+ 0 I is not positive definite"):
        Oracle(Quadratic.scalar(0.0, 1.0), Exact()).solve(torch.zeros(1))


def test_exact_is_for_quadratics_only():
    class Cubic:
        num_examples = 1

        def __call__(self, x):
            return (x**3).sum()

        def grad(self, x):
            return 3 * x**2

    with pytest.raises(TypeError, match=r"Exact solves Quadratic clients only, got Cubic\. Use GradientDescent"):
        Oracle(Cubic(), Exact()).solve(X)
    close(Oracle(Cubic(), GradientDescent(1, 0.1)).solve(X).x, X - 0.3 * X**2, 1e-15)


@pytest.mark.parametrize(("steps", "lr"), [(0, 0.1), (-1, 0.1), (1, 0.0), (1, -0.1), (1, float("nan"))])
def test_no_step_or_no_length_is_refused(steps, lr):
    with pytest.raises(ValueError, match=f"steps >= 1 and lr > 0, got steps={steps}, lr={lr}"):
        GradientDescent(steps, lr)
