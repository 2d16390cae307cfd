"""Golden trajectories: each averaging strategy against ten lines of NumPy, float64, on two real ranks."""

from __future__ import annotations

import numpy as np
import torch

from tests.ranks.replicas import FEATURES, Quadratic, Trial, make_parts, part, train
from tests.ranks.spawn import Rank, run_ranks

N, LR, STEPS = 2, 0.1, 13
START = {"a": np.full((FEATURES, 32), 2.0), "b": np.full(32, 1.0)}
Weights = dict[str, np.ndarray]


def _trained(rank: Rank, trial: Trial) -> list[Weights]:
    parts = make_parts(trial)
    states = train(parts, rank, 0, STEPS)
    parts.sync.close()
    return [{name: tensor.numpy() for name, tensor in state.items()} for state in states]


def _local_steps(x: list[Weights], step: int) -> np.ndarray:
    """Let each replica step by itself, in place; returns how many samples each saw."""
    parts = [part(step, i, N) for i in range(N)]
    for i, samples in enumerate(parts):
        if len(samples):
            x[i]["a"] -= LR * (x[i]["a"] - samples[:, 0].mean())
            x[i]["b"] -= LR * (x[i]["b"] - samples[:, 1].mean())
    return np.array([len(samples) for samples in parts])


def _replicas() -> list[Weights]:
    return [{k: v.copy() for k, v in START.items()} for _ in range(N)]


def _copied(x: list[Weights]) -> list[Weights]:
    return [{k: v.copy() for k, v in one.items()} for one in x]


def _compare(sync: str, expected: list[list[Weights]], collective: str = "backend") -> None:
    trial = Trial(sync, collective=collective, model=Quadratic, lr=LR)
    for i, states in enumerate(run_ranks(_trained, N, trial)):
        for step, state in enumerate(states):
            for key, value in state.items():
                np.testing.assert_allclose(
                    value, expected[step][i][key], rtol=0, atol=1e-9, err_msg=f"{i} {step} {key}"
                )


def test_local_averages_by_samples() -> None:
    x, seen, expected = _replicas(), np.zeros(N), []
    for step in range(STEPS):
        seen += _local_steps(x, step)
        if (step + 1) % 3 == 0:
            for k in START:
                mean = sum(n * one[k] for n, one in zip(seen, x, strict=True)) / seen.sum()
                for one in x:
                    one[k] = mean.copy()
            seen[:] = 0
        expected.append(_copied(x))
    _compare("local(3)", expected)
    _compare("local(3)", expected, collective="ring")


def test_local_keeps_the_steps_taken_while_the_mean_travels() -> None:
    period, overlap = 4, 2
    x, seen, taken, mean, expected = _replicas(), np.zeros(N), _replicas(), _replicas()[0], []
    for step in range(1, STEPS + 1):
        seen += _local_steps(x, step - 1)
        if step % period == 0:
            taken = _copied(x)
            mean = {k: sum(n * one[k] for n, one in zip(seen, x, strict=True)) / seen.sum() for k in START}
            seen = np.zeros(N)
        if step >= period and step % period == overlap:
            for one, before in zip(x, taken, strict=True):
                for k in START:
                    one[k] = mean[k] + (one[k] - before[k])
        expected.append(_copied(x))
    _compare(f"local({period}, overlap={overlap})", expected)


def test_easgd() -> None:
    x, seen, centre, beta, expected = _replicas(), np.zeros(N), _replicas()[0], 0.8, []
    for step in range(STEPS):
        seen += _local_steps(x, step)
        if (step + 1) % 2 == 0:
            for k in START:
                away = [one[k] - centre[k] for one in x]
                for one, d in zip(x, away, strict=True):
                    one[k] = one[k] - beta / N * d
                centre[k] = centre[k] + beta * sum(n * d for n, d in zip(seen, away, strict=True)) / seen.sum()
            seen[:] = 0
        expected.append(_copied(x))
    _compare("easgd(2, beta=0.8)", expected)
    _compare("easgd(2, rho=4.0)", expected)  # alpha = lr rho = 0.1 x 4


def _streaming(period: int, fragments: dict[str, int], overlap: int, alpha: float) -> list[list[Weights]]:
    """DiLoCo with Nesterov; `fragments` gives each parameter's step within a period."""
    outer_lr, mu = 0.7, 0.9
    x, theta = _replicas(), _replicas()[0]
    v = {k: np.zeros_like(START[k]) for k in START}
    seen = {k: np.zeros(N) for k in START}
    flying: dict[tuple[str, int], np.ndarray] = {}
    expected = []
    for step in range(1, STEPS + 1):
        saw = _local_steps(x, step - 1)
        for k, offset in fragments.items():
            seen[k] += saw
            if step % period == offset:
                deltas = [n * (theta[k] - one[k]) for n, one in zip(seen[k], x, strict=True)]
                flying[k, step + overlap], seen[k] = sum(deltas) / seen[k].sum(), np.zeros(N)
            if (k, step) in flying:
                delta = flying.pop((k, step))
                v[k] = mu * v[k] + delta
                theta[k] = theta[k] - outer_lr * (delta + mu * v[k])
                for one in x:
                    one[k] = alpha * one[k] + (1 - alpha) * theta[k]
        expected.append(_copied(x))
    return expected


def test_diloco() -> None:
    _compare("diloco(4)", _streaming(4, {"a": 0, "b": 0}, 0, 0.0))


def test_diloco_outer_step_agrees_with_torch_sgd() -> None:
    """The reference above is torch's own Nesterov."""
    theta = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    mine, v = 1.0, 0.0
    for delta in (0.3, -0.2, 0.5):
        theta.grad = torch.tensor(delta, dtype=torch.float64)
        outer.step()
        v = 0.9 * v + delta
        mine -= 0.7 * (delta + 0.9 * v)
    assert abs(mine - theta.item()) < 1e-12


def test_streaming_diloco() -> None:
    """Two fragments, each once per period, at different steps; then behind the computation, mixed in."""
    _compare("diloco(4, fragments=2)", _streaming(4, {"a": 0, "b": 2}, 0, 0.0))
    _compare("diloco(4, fragments=2, overlap=1)", _streaming(4, {"a": 0, "b": 2}, 1, 0.5))
    _compare("diloco(4, fragments=2, overlap=3, alpha=0.25)", _streaming(4, {"a": 0, "b": 2}, 3, 0.25))
