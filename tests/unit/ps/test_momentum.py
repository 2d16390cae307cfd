"""Momentum in the workers: one worker is torch's SGD, and many that do not wait converge as one does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echelon.optim.kernels import fuse
from echelon.ps.keystore import KeyStore, Push
from echelon.ps.momentum import SgdTerms, WorkerMomentum
from echelon.ps.table import KeyPart, KeyRange
from echelon.sync.ps import ServerSettings

LR = 0.1
KEY = KeyRange(0, 0, 6, 0, (KeyPart(0, 4, (4,), True, "w"), KeyPart(4, 6, (2,), False, "b")))
ABSENT = 3  # the step in which the second part gets no gradient


@pytest.mark.parametrize("terms", [SgdTerms(0.9, True, 0.01), SgdTerms(0.9, False, 0.0), SgdTerms(0.5, True, 0.0)])
def test_a_worker_alone_is_sgd(terms: SgdTerms) -> None:
    """To the bit, with weight decay on the part that has it, and a part without a gradient for once."""
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))
    value = torch.cat([weight.detach(), bias.detach()])
    groups = [{"params": [weight], "weight_decay": terms.weight_decay}, {"params": [bias], "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=LR, momentum=terms.momentum, nesterov=terms.nesterov)
    momentum, one = WorkerMomentum(terms), _store(value)
    for step in range(6):
        gradient = torch.randn(6)
        absent = {1} if step == ABSENT else set[int]()
        gradient[4:] *= not absent
        weight.grad, bias.grad = gradient[:4].clone(), None if absent else gradient[4:].clone()
        sgd.step()
        pushed = momentum.apply(KEY, gradient.clone(), lambda: one.value.clone(), absent)
        one.take(pushed_as(step, pushed, frozenset(absent)))
        torch.testing.assert_close(one.value, torch.cat([weight.detach(), bias.detach()]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("unused", [{0, 1}, {2}, {0, 3}])
def test_a_part_that_some_steps_do_not_use_is_moved_by_fused_sgd_as_by_the_plain_one(unused: set[int]) -> None:
    def fused(tensors: list[Tensor], decay: object) -> torch.optim.Optimizer:
        made = torch.optim.SGD(tensors, lr=LR, momentum=0.9, weight_decay=0.1)
        fuse(made)
        return made

    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))
    sgd = torch.optim.SGD([weight, bias], lr=LR, momentum=0.9, weight_decay=0.1)
    one = KeyStore(KEY, torch.cat([weight.detach(), bias.detach()]), ServerSettings(), fused)
    for step in range(5):
        gradient, absent = torch.randn(6), step in unused
        gradient[4:] *= not absent
        weight.grad, bias.grad = gradient[:4].clone(), None if absent else gradient[4:].clone()
        sgd.step()
        one.take(pushed_as(step, gradient, frozenset({1} if absent else ())))
        torch.testing.assert_close(one.value, torch.cat([weight.detach(), bias.detach()]))


def test_many_workers_converge_as_one() -> None:
    """Each with a part of every batch, on values that are as old as there are others; momentum for all overshoots."""
    curvature = torch.logspace(-2, 0, 6) * 4
    alone = _distance(curvature, workers=1, own=True)
    assert _distance(curvature, workers=32, own=True) < 1.5 * alone
    assert not _distance(curvature, workers=4, own=False) < 1000 * alone


def test_workers_that_look_ahead_take_a_higher_rate() -> None:
    """Where the others will have moved the parameters; it does not help one alone."""
    curvature = torch.logspace(-2, 0, 6) * 6
    assert _distance(curvature, workers=8, own=True, ahead=True) < _distance(curvature, workers=8, own=True)
    steep = torch.full((6,), 8.0)
    assert _distance(steep, workers=8, own=True, ahead=True) < 0.1 < _distance(steep, workers=8, own=True)
    assert _distance(curvature, workers=1, own=True, ahead=True) == _distance(curvature, workers=1, own=True)


def _store(value: Tensor) -> KeyStore:
    return KeyStore(KEY, value, ServerSettings(), lambda tensors, decay: torch.optim.SGD(tensors, lr=LR))


def pushed_as(task: int, gradient: Tensor, absent: frozenset[int], lr: float = LR) -> Push:
    return Push(f"w{task}", task, step=task, share=0, shares=1, units=1, base=0, batch=1, lr=lr, gradient=gradient,
                absent=absent)  # fmt: skip


def _distance(curvature: Tensor, workers: int, own: bool, ahead: bool = False) -> float:
    """Train on a quadratic for 60 batches by turns, and return how far from its minimum it ends."""
    terms, one = SgdTerms(0.9, True, 0.0, (workers - 1) * ahead), _store(torch.ones(6))
    each = [WorkerMomentum(terms) for _ in range(workers)]
    pulled = [one.value.clone() for _ in range(workers)]
    for task in range(60 * workers):
        worker = task % workers
        momentum = each[worker if own else 0]
        there = momentum.ahead(KEY, slice(0, 4), pulled[worker][:4], LR / workers)
        there = torch.cat([there, momentum.ahead(KEY, slice(4, 6), pulled[worker][4:], LR / workers)])
        gradient = momentum.apply(KEY, curvature * there, lambda: torch.empty(0), ())
        one.take(pushed_as(task, gradient, frozenset(), LR / workers))
        pulled[worker] = one.value.clone()
    return float(one.value.norm())
