"""The DDP hook between real processes: same gradients, same bits on all ranks, resumable, order-proof."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.collectives import GradientHook
from echelon.collectives import registry as paths
from echelon.collectives.ddp import DdpHook
from echelon.collectives.registry import examples
from echelon.compression import read
from echelon.core.errors import UserError
from tests.ranks.spawn import Rank, Struck, fail_at, run_ranks


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 64),
        nn.ReLU(),
        nn.Linear(64, 40),
    )


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def _train(ddp: DistributedDataParallel, rank: Rank, steps: range) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank.index)
        x = torch.randn(6, 1, 8, 8, generator=generator)
        y = torch.randint(40, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()


def _same_everywhere(x: Tensor) -> bool:
    first = x.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, x)


def like_plain_ddp(rank: Rank, hooks: list[tuple[str, str]]) -> list[tuple[bool, bool, int]]:
    """For each (compression, collective): near plain DDP's parameters after 5 steps, same on all ranks, bytes."""
    plain = DistributedDataParallel(_model())
    _train(plain, rank, range(5))
    found = []
    for compression, collective in hooks:
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.05)
        hook = GradientHook(None, read(compression), paths.build(collective), average=True)
        hook.attach(ddp)
        _train(ddp, rank, range(5))
        near = torch.allclose(_flat(ddp), _flat(plain), atol=1e-6 if compression == "none" else 2e-2)
        found.append((near, _same_everywhere(_flat(ddp)), hook.wire.by_group["weights"] // hook.wire.steps))
    return found


def test_every_path_trains_as_plain_ddp_does() -> None:
    paths = ["backend", "ring", *(s[0] for name, s in examples().items() if name not in ("backend", "ring"))]
    for found in run_ranks(like_plain_ddp, 3, [("none", p) for p in paths]):
        assert all(near and same for near, same, _ in found), found
        assert found[0][2] == pytest.approx(found[1][2], rel=0.01)


def test_codecs_train_with_many_buckets_and_send_less() -> None:
    hooks = [
        ("none", "backend"),
        ("bf16", "ring"),
        ("int8", "backend"),
        ("topk(density=0.05)", "backend"),
        ("powersgd(2)", "backend"),
    ]
    for found in run_ranks(like_plain_ddp, 2, hooks):
        assert all(same for _, same, _ in found)
        assert found[1][0] and found[2][0]
        whole = found[0][2]
        assert [round(whole / sent) for _, _, sent in found[1:3]] == [2, 4]
        assert all(sent < whole / 8 for _, _, sent in found[3:])


def entropy_coded(rank: Rank, compression: str) -> dict[str, int]:
    ddp = DistributedDataParallel(_model())
    hook = GradientHook(None, read(compression), average=True)
    hook.attach(ddp)
    _train(ddp, rank, range(3))
    return hook.entropy_coded()


def test_what_entropy_coding_saved_is_counted() -> None:
    for found in run_ranks(entropy_coded, 2, "topk(density=0.05, warmup_steps=0)+huffman"):
        assert found["planes_coded"] + found["planes_plain"] > 0
        assert 0 < found["sent_bytes"] <= found["plain_bytes"] * 1.05
    assert run_ranks(entropy_coded, 2, "int8") == [{}, {}]


def density(rank: Rank, compression: str) -> float | None:
    ddp = DistributedDataParallel(_model())
    hook = GradientHook(None, read(compression), average=True)
    hook.attach(ddp)
    assert hook.density() is None, "nothing was sent yet"
    _train(ddp, rank, range(3))
    return hook.density()


@pytest.mark.parametrize(
    ("compression", "wanted"), [("topk(density=0.05)+huffman", 0.05), ("randomk(density=0.1)", 0.1), ("int8", None)]
)
def test_what_share_of_elements_was_sent_is_known(compression: str, wanted: float | None) -> None:
    assert run_ranks(density, 2, compression) == [wanted and pytest.approx(wanted, rel=0.05)] * 2


def sums(rank: Rank, compression: str) -> float:
    """The hook of a loop that normalises by itself: gradients are summed."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    GradientHook(None, read(compression), average=False).attach(ddp)
    ddp(torch.full((1, 64), rank.index + 1.0)).sum().backward()
    assert model.weight.grad is not None
    return float(model.weight.grad.mean())


@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "powersgd(rank=1)"])
def test_the_sum_is_not_divided(compression: str) -> None:
    assert run_ranks(sums, 3, compression) == pytest.approx([6.0] * 3, rel=1e-2)


def resume(rank: Rank, compression: str) -> tuple[bool, bool]:
    """Six steps in a row, or three and, with another model, other buckets and what was saved, three more."""
    whole = DistributedDataParallel(_model(), bucket_cap_mb=0.05)
    GradientHook(None, read(compression), average=True).attach(whole)
    _train(whole, rank, range(6))

    before = DistributedDataParallel(_model())
    hook = GradientHook(None, read(compression), average=True)
    hook.attach(before)
    _train(before, rank, range(3))
    saved = {k: v.clone() if isinstance(v, Tensor) else v for k, v in hook.state_dict().items()}

    after = DistributedDataParallel(_model(1), bucket_cap_mb=0.02)
    after.load_state_dict(before.state_dict())
    again = GradientHook(None, read(compression), average=True)
    again.attach(after)
    again.load_state_dict(saved)
    _train(after, rank, range(3, 6))
    return torch.equal(_flat(whole), _flat(after)), bool(saved)


@pytest.mark.parametrize(
    "compression",
    [
        "topk(density=0.05, momentum=0.9)",
        "powersgd(rank=2)",
        "sign",
        "threshold(density=0.05)",
        "int8",
        "adaptive(follow_link=false)",
    ],
)
def test_a_resumed_run_has_the_same_bits_whatever_the_buckets(compression: str) -> None:
    assert run_ranks(resume, 2, compression) == [(True, True)] * 2


def overflow(rank: Rank, compression: str) -> tuple[bool, bool, bool, str]:
    """One rank's gradient overflows in one step: everyone must see it, and no memory may change."""
    ddp = DistributedDataParallel(_model())
    hook = GradientHook(None, read(compression), average=True)
    hook.attach(ddp)
    _train(ddp, rank, range(2))
    before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in hook.state_dict().items()}
    ddp.zero_grad()
    scale = torch.inf if rank.index == 1 else 1.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        (ddp(torch.ones(2, 1, 8, 8))[:, 3].sum() * scale).backward()
    void = not all(bool(torch.isfinite(p.grad).all()) for p in ddp.parameters() if p.grad is not None)
    kept = all(torch.equal(torch.as_tensor(v), torch.as_tensor(before[k])) for k, v in hook.state_dict().items())
    _train(ddp, rank, range(2, 3))
    (said,) = [str(w.message).split(":")[0] for w in warned if issubclass(w.category, UserWarning)]
    return void, kept, bool(torch.isfinite(_flat(ddp)).all()), said


@pytest.mark.parametrize("compression", ["topk(density=0.05)", "powersgd(rank=2)"])
def test_an_overflow_is_seen_everywhere_and_forgotten(compression: str) -> None:
    other, own = run_ranks(overflow, 2, compression)
    assert other == (True, True, True, "a gradient of another rank is not finite")
    assert own[:3] == (True, True, True) and "'6.weight'" in own[3], own[3]


def beyond_half(rank: Rank) -> str:
    """A gradient of rank 1 is finite, but more than half precision can hold."""
    ddp = DistributedDataParallel(_model())
    GradientHook(None, read("fp16"), average=True).attach(ddp)
    scale = 1e8 if rank.index == 1 else 1.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        (ddp(torch.ones(2, 1, 8, 8))[:, 3].sum() * scale).backward()
    (said,) = [str(w.message).split(":")[0] for w in warned if issubclass(w.category, UserWarning)]
    return said


def test_a_gradient_that_half_precision_cannot_hold_is_named() -> None:
    other, own = run_ranks(beyond_half, 2)
    assert other.startswith("a gradient of another rank is not finite or beyond 65504")
    assert "'6.weight'" in own and "65504" in own


def plain_user(rank: Rank, attached: bool) -> tuple[bool, list[str]]:
    hook = echelon.ddp_hook("topk(density=0.05)")
    ddp = DistributedDataParallel(_model())
    if attached:
        hook.attach(ddp)
    else:
        ddp.register_comm_hook(hook, DdpHook.function)
    _train(ddp, rank, range(3))
    again = echelon.ddp_hook("topk(density=0.05)")
    again.load_state_dict(hook.state_dict())
    other = DistributedDataParallel(_model())
    again.attach(other) if attached else other.register_comm_hook(again, DdpHook.function)
    _train(other, rank, range(1))
    assert hook.wire.steps == 3
    return _same_everywhere(_flat(ddp)), sorted({k.split("/")[1] for k in hook.state_dict() if k.startswith("sent")})


class _HoldBackward(torch.autograd.Function):
    """Lets backward pass only when something more has been sent than before it, or after ten seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: GradientHook, seen: list[bool]) -> Tensor:
        ctx.hook, ctx.seen, ctx.before = hook, seen, hook.wire.total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ends = time.monotonic() + 10
        while (
            not ctx.hook.after_backward and ctx.before and ctx.hook.wire.total == ctx.before and time.monotonic() < ends
        ):
            threading.Event().wait(0.001)
        ctx.seen.append(ctx.hook.wire.total > ctx.before)
        return gradient, None, None


def hold(rank: Rank, compression: str, after_backward: bool = False) -> list[bool]:
    hook, seen = GradientHook(None, read(compression), average=True), []
    early, late = nn.Linear(512, 512), nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = early, late

        def forward(self, x: Tensor) -> Tensor:
            return self.late(_HoldBackward.apply(self.early(x), hook, seen))

    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1)
    hook.attach(ddp)
    assert not hook.after_backward
    hook.after_backward = after_backward
    for _ in range(2):  # DDP has a single bucket in its first backward
        ddp(torch.ones(2, 512)).sum().backward()
    hook.close()
    return seen


@pytest.mark.parametrize("compression", ["int8", "topk(0.01)", "powersgd(rank=1)"])
def test_buckets_go_out_while_backward_still_runs(compression: str) -> None:
    assert run_ranks(hold, 2, compression) == [[False, True]] * 2


def test_buckets_wait_for_the_end_of_backward_where_torch_gathers_statistics_in_it() -> None:
    assert run_ranks(hold, 2, "int8", True) == [[False, False]] * 2


class _Locked(Exception):
    """An error that pickle cannot take."""

    def __init__(self) -> None:
        super().__init__("a link is down")
        self.lock = threading.Lock()


def unpicklable(rank: Rank) -> str:
    hook = GradientHook(None, read("int8"), average=True)
    ddp = DistributedDataParallel(_model())
    hook.attach(ddp)

    def breaks(bucket: object) -> None:
        raise _Locked

    hook._work.work = breaks  # type: ignore[union-attr, method-assign, assignment]
    try:
        ddp(torch.ones(2, 1, 8, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        hook.close()
    return "backward went on"


def test_an_error_that_cannot_be_pickled_ends_backward_in_words() -> None:
    assert all("_Locked: a link is down" in said for said in run_ranks(unpicklable, 2))


def placement(rank: Rank) -> list[tuple[str, float, float, int]]:
    """Attach with an optimizer and without; returns the spec, momentum and decay that are left, and the warnings."""
    found = []
    for compression in ("sign", "topk(0.05)+huffman", "sign(momentum=0.9)", "powersgd(rank=1)", "none"):
        for handed in (True, False):
            ddp = DistributedDataParallel(_model())
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
            hook = echelon.ddp_hook(compression)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", UserWarning)
                hook.attach(ddp, optimizer if handed else None)
            (group,) = optimizer.param_groups
            found.append((hook.compression, group["momentum"], round(group["weight_decay"], 6), len(warned)))
            hook.close()
    return found


def test_momentum_goes_where_the_codec_wants_it_or_a_warning_says_so() -> None:
    assert run_ranks(placement, 2)[0] == [
        *[("sign(momentum=0.9)", 0.0, 1.0, 0), ("sign", 0.9, 0.1, 1)],
        *[("topk(density=0.05, momentum=0.9)+huffman", 0.0, 1.0, 0), ("topk(density=0.05)+huffman", 0.9, 0.1, 1)],
        *[("sign(momentum=0.9)", 0.0, 1.0, 0), ("sign(momentum=0.9)", 0.9, 0.1, 0)],
        *[("powersgd(rank=1)", 0.9, 0.1, 0)] * 2,
        *[("none", 0.9, 0.1, 0)] * 2,
    ]


def sgd_by_codec(rank: Rank, nesterov: bool) -> float:
    """Distance from DDP with SGD's momentum, when all is sent in each step and the codec has the momentum."""
    ends = []
    for compression in ("none", "topk(1.0, values=fp32)"):
        ddp = DistributedDataParallel(_model().double())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov)
        hook = echelon.ddp_hook(compression)
        hook.attach(ddp, optimizer)
        for step in range(6):
            x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank.index)).double()
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        ends.append(_flat(ddp.module))
        hook.close()
    assert not torch.equal(ends[0], _flat(_model().double()))
    return float((ends[0] - ends[1]).abs().max())


@pytest.mark.parametrize("nesterov", [False, True])
def test_where_all_is_sent_a_codecs_momentum_is_that_of_sgd(nesterov: bool) -> None:
    """For what is encoded and for what travels whole beside it."""
    assert max(run_ranks(sgd_by_codec, 2, nesterov)) < 1e-6


def test_a_plain_ddp_user_needs_one_line() -> None:
    assert run_ranks(plain_user, 2, True) == [(True, ["4.weight", "6.weight"])] * 2
    same, keys = run_ranks(plain_user, 2, False)[0]
    assert same and len(keys) == 2


def die(rank: Rank, compression: str) -> str:
    """Without buffers, and after DDP has settled its buckets, only the hook communicates."""
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    GradientHook(
        None, read(compression), paths.build("ring" if compression == "none" else "backend"), average=True
    ).attach(ddp)
    for step in range(3):
        if step == 2:
            rank.reach(1)
        try:
            ddp(torch.ones(1, 64)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("compression", ["none", "int8", "powersgd(rank=1)"])
def test_a_dead_peer_ends_backward_with_an_error(compression: str) -> None:
    gone, words = run_ranks(die, 2, compression, faults=[fail_at(0, 1)])
    assert gone == Struck("kill")
    assert "lost" in words


def ends(rank: Rank) -> list[str]:
    ddp = DistributedDataParallel(_model())
    hook: Any = GradientHook(None, read("int8"), average=True)
    hook.attach(ddp)
    _train(ddp, rank, range(1))
    assert any(t.name == "echelon-communication" for t in threading.enumerate())
    thread = hook._thread._thread
    del ddp, hook
    gc.collect()
    thread.join(20)
    return [t.name for t in threading.enumerate() if t.name == "echelon-communication"]


def test_the_thread_ends_with_its_model() -> None:
    assert run_ranks(ends, 2) == [[], []]


def alone(rank: Rank) -> list[Tensor]:
    """Return a gradient of ones after each of three steps of one rank by itself, along a path of groups."""
    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    hook = GradientHook(None, read("topk(1, momentum=0.5)"), paths.build("hierarchical(group=2)"), average=True)
    hook.attach(ddp)
    found = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 64)).sum().backward()
        found.append(ddp.module.weight.grad.clone())
    hook.close()
    return found


def test_a_codec_of_one_rank_applies_its_momentum_along_a_path_of_groups_too() -> None:
    (found,) = run_ranks(alone, 1)
    assert [float(gradient.mean()) for gradient in found] == [1.0, 1.5, 1.75]


def refused(rank: Rank) -> list[str]:
    words = []
    pairs = [("topk(0.1)", "ring"), ("topk(0.1)", "hierarchical(group=2)"), ("tpok(0.1)", "backend"), ("int8", "rign")]
    for compression, collective in pairs:
        try:
            GradientHook(None, read(compression), paths.build(collective), average=True)
        except UserError as error:
            words.append(str(error))
    return words


def test_what_cannot_work_is_refused_in_words() -> None:
    words, _ = run_ranks(refused, 2)
    assert "collective backend or hierarchical" in words[0]
    assert "hierarchical(group=2) makes one group of 2 replicas" in words[1]
    assert "did you mean topk" in words[2]
    assert "did you mean ring" in words[3]
