"""Sums in the order in which forward needs them, updates layer by layer: the same bits as sums in one go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.checkpoint.tree import flatten
from echelon.collectives.piece_order import MOST_BYTES
from echelon.collectives.registry import examples
from echelon.collectives.transfer import PeerLostError
from echelon.core.errors import UserError
from echelon.trainer.state import RunParts
from tests.ranks.replicas import FEATURES, Trial, load, make_parts, part, save, targets
from tests.ranks.spawn import Rank, Struck, fail_at, run_ranks

TRIALS: list[dict[str, Any]] = [
    {"momentum": 0.9, "lr": 0.01},
    {"optimizer": torch.optim.AdamW, "lr": 0.01},
]


class Uncalled(nn.Module):
    """Its large layer comes last and is longer than two pieces; two layers share a weight; one layer is not called,
    but its weight is read, and another is read in no way that torch sees; a bias is used in some steps alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 40)
        self.again = nn.Linear(40, 40)
        self.uncalled = nn.Linear(40, 40)
        self.scripted = torch.jit.trace(nn.Linear(40, 40), torch.zeros(1, 40))
        self.large = nn.Linear(40, 3 * MOST_BYTES // (4 * 40) - 7)
        self.last = nn.Linear(self.large.out_features, 1)
        self.norm = nn.BatchNorm1d(40)
        self.shared = nn.Linear(40, 40, bias=False)
        self.shared.weight = self.again.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.float())
        h = nn.functional.linear(h, self.uncalled.weight, self.uncalled.bias if len(x) % 3 == 0 else None)
        if len(x) > 1:
            h = self.norm(h)
        h = self.shared(torch.tanh(self.again(h) + self.scripted(h)))
        return (self.last(torch.tanh(self.large(h))) / 30).square().sum()


@dataclass(frozen=True)
class Trained:
    """What training ends with: parameters and moments in one vector, and the bytes that this rank has sent."""

    state: Tensor
    n_bytes: int


def take_steps(run_parts: RunParts, rank: Rank, first: int, last: int) -> None:
    """Take steps whose rates fall, two micro-batches in each third one."""
    for step in range(first, last):
        batch = 2 * (step % 2)  # ranks have samples in each
        x = torch.from_numpy(part(batch, rank.index, rank.world_size))
        for group in run_parts.optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        divisor = run_parts.sync.begin_step(len(x), len(targets(batch)))
        micro = [x] if step % 3 else [x[:1], x[1:]]
        for number, samples in enumerate(micro):
            with run_parts.sync.micro_batch(last=number == len(micro) - 1):
                (run_parts.sync.module(samples) / divisor).backward()
        run_parts.sync.step()


def state_of(run_parts: RunParts) -> Tensor:
    """Return parameters and moments in one vector."""
    with run_parts.sync.agreed():
        states = [run_parts.optimizer.state[p] for p in run_parts.model.parameters()]
        moments = [torch.as_tensor(state[name]) for state in states for name in sorted(state)]
        return torch.cat([t.detach().flatten().double() for t in (*run_parts.model.parameters(), *moments)])


def trained(rank: Rank, paths: list[str], trials: list[dict[str, Any]]) -> list[list[Trained]]:
    """Return what each trial ends with, for each path."""
    results: list[list[Trained]] = []
    for collective in paths:
        results.append([])
        for settings in trials:
            run_parts = make_parts(Trial("allreduce", collective=collective, model=Uncalled, **settings))
            take_steps(run_parts, rank, 0, 6)
            state = state_of(run_parts)
            first = state.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, state), "all ranks have the same"
            run_parts.sync.close()
            results[-1].append(Trained(state, sum(run_parts.sync.bytes_sent().values())))
    return results


def test_between_two_ranks_bits_are_those_of_sums_in_one_go() -> None:
    for ready, priority in run_ranks(trained, 2, ["backend", "backend(order=priority)"], TRIALS):
        for at_once, by_layer in zip(ready, priority, strict=True):
            assert torch.equal(at_once.state, by_layer.state)
            assert by_layer.n_bytes == pytest.approx(at_once.n_bytes, rel=0.02)


def test_along_every_path_of_three_ranks_the_sums_are_the_same() -> None:
    """Up to rounding: another length of a message is summed in another order."""
    specs = [named[0] for named in examples().values()]
    by_priority = [
        f"{spec[:-1]}, order=priority)" if spec.endswith(")") else f"{spec}(order=priority)" for spec in specs
    ]
    results = run_ranks(trained, 3, [*specs, *by_priority], TRIALS[:1])[0]
    for (ready,), (priority,) in zip(results[: len(specs)], results[len(specs) :], strict=True):
        assert torch.allclose(ready.state, priority.state, atol=1e-6)
        of_steps = ready.n_bytes * 6 / 7  # without the backward pass before them, by which DDP orders its buckets
        assert priority.n_bytes == pytest.approx(of_steps, rel=0.05)


def resumed(rank: Rank) -> bool:
    """Whether a run that is stopped while its last update is under way, and resumed, ends with the same bits."""
    trial = Trial("allreduce", collective="ring(order=priority)", model=Uncalled, **TRIALS[0])
    through, stopped = make_parts(trial), make_parts(trial)
    take_steps(through, rank, 0, 6)
    take_steps(stopped, rank, 0, 3)
    saved = save(stopped, rank, 3)
    stopped.sync.close()
    again = make_parts(trial)
    load(again, rank, saved)
    take_steps(again, rank, 3, 6)
    ends = [state_of(each) for each in (through, again)]
    through.sync.close()
    again.sync.close()
    assert flatten(saved[0])[1], "something was saved"
    return torch.equal(*ends)


def test_a_checkpoint_has_the_update_that_was_under_way() -> None:
    assert run_ranks(resumed, 3) == [True] * 3


def die(rank: Rank) -> str:
    run_parts = make_parts(Trial("allreduce", collective="backend(order=priority)", model=Uncalled, **TRIALS[0]))
    take_steps(run_parts, rank, 0, 2)
    rank.reach(1)
    try:
        take_steps(run_parts, rank, 2, 5)
    except PeerLostError as error:
        return str(error)
    return ""


def test_a_dead_peer_ends_the_next_forward_pass_with_an_error() -> None:
    gone, words = run_ranks(die, 2, faults=[fail_at(0, 1)])
    assert gone == Struck("kill")
    assert "lost" in words


def test_loops_of_others_are_refused() -> None:
    with pytest.raises(UserError, match="order=priority is of runs"):
        echelon.ddp_hook("none", "ring(order=priority)")
