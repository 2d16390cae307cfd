"""A loop of one's own around `echelon.wrap` does what the engine's loop does, bit for bit, and resumes as exactly."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.core.errors import UserError
from echelon.sync.own_loop import Replica
from tests.ranks.replicas import FEATURES, Net, Trial, copy, make_parts
from tests.ranks.spawn import Rank, run_ranks

STEPS, SAMPLES = 13, 4
STRATEGIES = [
    ("local(3)", "none", "backend"),
    ("local(3)", "topk(0.1)", "backend"),
    ("local(4, overlap=2)", "bf16", "ring"),
    ("local(3, start=5)", "none", "backend"),
    ("diloco(4, fragments=2, overlap=1)", "none", "backend"),
    ("easgd(2)", "none", "backend"),
]
SUMS = [
    ("allreduce", "none", "backend"),
    ("allreduce", "none", "ring"),
    ("allreduce", "int8", "backend"),
    ("local(3, start=5)", "topk(0.1)", "backend"),
]


def batch(rank: Rank, step: int) -> Tensor:
    """Return a rank's samples: as many on each, for each step weighs the same."""
    generator = torch.Generator().manual_seed(100 * step + rank.index)
    return torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)


def wrapped(sync: str, compression: str, collective: str, given_as_ddp: bool = False) -> Replica:
    torch.manual_seed(dist.get_rank())  # wrap gives all the first one's
    model: nn.Module = Net()
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        model = Net()
    if given_as_ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return echelon.wrap(model, optimizer, sync, compression, collective, seed=3)


def own_loop(rank: Rank, replica: Replica, first: int, last: int) -> list[dict[str, Tensor]]:
    seen = []
    for step in range(first, last):
        replica.optimizer.zero_grad()
        (replica.model(batch(rank, step)) / SAMPLES).backward()
        replica.optimizer.step()
        seen.append(_state(replica))
    return seen


def _state(replica: Replica) -> dict[str, Tensor]:
    model = replica.model
    return copy((model.module if isinstance(model, DistributedDataParallel) else model).state_dict())


def engines_loop(rank: Rank, sync: str, compression: str, collective: str) -> list[dict[str, Tensor]]:
    parts = make_parts(Trial(sync, compression, collective, momentum=0.9))
    seen = []
    for step in range(STEPS):
        x = batch(rank, step)
        divisor = parts.sync.begin_step(SAMPLES, SAMPLES * rank.world_size)
        with parts.sync.micro_batch(last=True):
            (parts.sync.module(x) / divisor).backward()
        parts.sync.step()
        seen.append(copy(parts.model.state_dict()))
    parts.sync.close()
    return seen


def _distance(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]], buffers: bool = True) -> float:
    """Return the largest difference; without buffers where somebody's DDP broadcasts its first rank's."""
    names = [name for name in ours[0] if buffers or name in dict(Net().named_parameters())]
    pairs = zip(ours, theirs, strict=True)
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in names)


def compared(rank: Rank, sync: str, compression: str, collective: str) -> tuple[float, float, float, int, int]:
    """Return distances of a wrapped loop to the engine's, of one given as DDP, and of one that was resumed."""
    engine = engines_loop(rank, sync, compression, collective)
    straight = wrapped(sync, compression, collective)
    seen = own_loop(rank, straight, 0, STEPS)
    as_ddp = wrapped(sync, compression, collective, given_as_ddp=True)
    through_ddp = own_loop(rank, as_ddp, 0, STEPS)
    begun = wrapped(sync, compression, collective)
    own_loop(rank, begun, 0, 7)
    saved = io.BytesIO()
    torch.save([_state(begun), begun.optimizer.state_dict(), begun.state_dict()], saved)
    begun.close()
    saved.seek(0)
    resumed = wrapped(sync, compression, collective)
    model, optimizer, state = torch.load(saved)
    (resumed.model.module if hasattr(resumed.model, "module") else resumed.model).load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.load_state_dict(state)
    again = own_loop(rank, resumed, 7, STEPS)
    to_ddp = _distance(through_ddp, engine, buffers=sync != "allreduce")
    result = _distance(seen, engine), to_ddp, _distance(again, seen[7:])
    for replica in (straight, as_ddp, resumed):
        replica.close()
    return *result, straight.bytes_sent, resumed.steps


@pytest.mark.parametrize(("sync", "compression", "collective"), STRATEGIES, ids=lambda spec: spec)
def test_a_wrapped_loop_averages_as_the_engine_does(sync: str, compression: str, collective: str) -> None:
    for to_engine, as_ddp, resumed, sent, steps in run_ranks(compared, 2, sync, compression, collective):
        assert (to_engine, as_ddp, resumed, steps) == (0, 0, 0, STEPS) and sent > 0


@pytest.mark.parametrize(("sync", "compression", "collective"), SUMS, ids=lambda spec: spec)
def test_a_wrapped_loop_reduces_gradients_as_the_engine_does(sync: str, compression: str, collective: str) -> None:
    """Means are divided in another order than sums: to the rounding."""
    for to_engine, as_ddp, resumed, sent, _ in run_ranks(compared, 2, sync, compression, collective):
        assert max(to_engine, as_ddp) < 1e-12 and resumed == 0 and sent > 0


def hooked(rank: Rank) -> tuple[float, float]:
    """Return how far a wrapped loop is from the same with the hook, with a codec that takes over the momentum."""
    replica = wrapped("allreduce", "topk(0.1)", "backend")
    ours = own_loop(rank, replica, 0, STEPS)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    hook = echelon.ddp_hook("topk(0.1)", seed=3)
    hook.attach(ddp, optimizer)
    theirs = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (ddp(batch(rank, step)) / SAMPLES).backward()
        optimizer.step()
        theirs.append(copy(ddp.module.state_dict()))
    replica.close()
    hook.close()
    return _distance(ours, theirs, buffers=False), replica.optimizer.param_groups[0]["momentum"]


def test_a_wrapped_all_reduce_is_the_hook() -> None:
    assert run_ranks(hooked, 2) == [(0.0, 0.0)] * 2


def overflows(rank: Rank) -> tuple[int, list[float], str]:
    """Train with a GradScaler where one replica's gradient overflows once: both go on, and agree."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    replica = echelon.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "local(2)")
    scaler = torch.amp.GradScaler("cpu", 4.0)
    schedule = torch.optim.lr_scheduler.StepLR(replica.optimizer, 2)
    for step in range(4):
        replica.optimizer.zero_grad()
        loss = replica.model(torch.ones(2, 3)).mean() * (torch.inf if (step, rank.index) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(replica.optimizer)
        scaler.update()
        schedule.step()
    return replica.steps, model.weight.detach().flatten().tolist(), type(replica.model).__name__


def test_a_step_that_overflows_on_one_replica_keeps_the_others_company() -> None:
    (steps, weights, kind), other = run_ranks(overflows, 2)
    assert (steps, weights, kind) == other and steps == 4 and kind == "Linear"
    assert all(abs(w) < 10 for w in weights)


def shown(rank: Rank) -> tuple[list[float], list[float], list[float]]:
    model = nn.Linear(1, 1, bias=False)
    replica = echelon.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), "local(10)")
    with torch.no_grad():
        model.weight.fill_(0.0)
    (model(torch.ones(1, 1)) * (rank.index + 1)).sum().backward()
    replica.optimizer.step(lambda: 1.0)
    before = model.weight.flatten().tolist()
    with replica.agreed():
        inside = model.weight.flatten().tolist()
    return before, inside, model.weight.flatten().tolist()


def test_what_replicas_agree_on_is_shown_and_taken_back() -> None:
    assert run_ranks(shown, 2) == [([-1.0], [-1.5], [-1.0]), ([-2.0], [-1.5], [-2.0])]


MISTAKES = {
    "sync ps.mode=async.: servers hold the parameters": {"sync": "ps(mode=async)"},
    "sync: unknown strategy 'locl': did you mean local": {"sync": "locl(3)"},
    "gives directions of a fixed size": {"sync": "local(3)", "compression": "sign(vote=true)"},
    "spoils training: leave out start": {"sync": "local(3, start=9)", "compression": "sign"},
    "unknown compression": {"compression": "topc(0.1)"},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_what_does_not_fit_is_refused_in_one_line(message: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(UserError, match=message) as refusal:
        echelon.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **MISTAKES[message])
    assert "\n" not in str(refusal.value)


def test_objects_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    with pytest.raises(UserError, match="none of the model's parameters"):
        echelon.wrap(model, torch.optim.SGD(other.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = echelon.wrap(model, optimizer, "local(2)")
    with pytest.raises(UserError, match="wrapped already"):
        echelon.wrap(model, optimizer, "local(2)")
    with pytest.raises(UserError, match="saved state is of sync local"):
        saved = replica.state_dict()
        replica.close()
        echelon.wrap(model, optimizer, "easgd(2)").load_state_dict(saved)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="init_process_group"):
        echelon.wrap(other, torch.optim.SGD(other.parameters(), lr=0.1))
