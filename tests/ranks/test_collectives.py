"""Paths and the compressed all-reduce between real processes."""

from __future__ import annotations

import math
import random
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import all_reduce, messages, open_route
from echelon.collectives import registry as paths
from echelon.collectives.messages import Mailbox, seal
from echelon.collectives.reducer import Coding, make_reducer
from echelon.collectives.registry import examples
from echelon.collectives.schedule import Ring
from echelon.collectives.transfer import PeerLostError
from echelon.compression.registry import build as build_codec
from echelon.compression.registry import examples as codec_examples
from echelon.core.shards import FlatTensor
from tests.ranks.spawn import Rank, Struck, fail_at, run_ranks

PATHS = [spec for specs in examples().values() for spec in specs[:2]]
WITH_SETTINGS = [
    "fp16",
    "bf16",
    "int8",
    "qsgd(levels=7)",
    "qsgd(levels=7)+huffman",
    "ternary",
    "sign",
    "sign(vote=true)",
    "threshold(density=0.05)",
    "topk(density=0.05)",
    "topk(density=0.05, momentum=0.9)+huffman",
    "randomk(density=0.1)",
    "powersgd(rank=2)",
]
CODECS = WITH_SETTINGS + [
    specs[0]
    for name, specs in codec_examples().items()
    if name != "none" and not any(re.match(rf"{name}\b", spec) for spec in WITH_SETTINGS)
]
REPEATS = 12
LENGTHS = [0, 1, 3, 1000, 300_001]


def _whole(name: str, numel: int) -> list[FlatTensor]:
    return [FlatTensor(name, (numel,), (0, numel))]


def sum_everything(rank: Rank) -> list[str]:
    """Each path, dtype and length against the backend's own sum; returns what was wrong."""
    wrong = []
    for path in PATHS:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for numel in LENGTHS if dtype == torch.float32 else [1000]:
                # Small whole numbers: sums are exact in every dtype, so that the order of additions does not show.
                x = torch.arange(numel).remainder(16).add(rank.index).to(dtype)
                wanted = x.clone()
                dist.all_reduce(wanted)
                all_reduce(x, path=path)
                if not torch.equal(x, wanted):
                    wrong.append(f"{path} {dtype} {numel}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_path_is_the_sum(world_size: int) -> None:
    assert run_ranks(sum_everything, world_size) == [[]] * world_size


def strided(rank: Rank) -> bool:
    x = torch.ones(6, 4).t()
    all_reduce(x, path="ring")
    return bool((x == 2).all())


def test_a_strided_tensor_is_summed_too() -> None:
    assert run_ranks(strided, 2) == [True, True]


GROUP_S = 8  # seconds


def lose_a_peer(rank: Rank) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=GROUP_S))  # its connections too must be made in that time
    x = torch.ones(100_000)
    all_reduce(x, group, "ring")
    rank.reach(1)
    began = time.monotonic()
    try:
        all_reduce(x, group, "ring")
    except PeerLostError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize(  # of two by the backend, of three by a schedule
    ("world_size", "how"),
    [
        (2, "kill"),
        pytest.param(2, "stop", marks=pytest.mark.slow),
        (3, "kill"),
        pytest.param(3, "stop", marks=pytest.mark.long),
    ],
)
def test_a_lost_peer_ends_the_wait_in_words(world_size: int, how: str) -> None:
    ended = run_ranks(lose_a_peer, world_size, faults=[fail_at(0, 1, how)])  # type: ignore[arg-type]
    gone, survivor = ended[:2]
    assert gone == Struck(how)
    assert "lost rank 0" in survivor[0]
    assert survivor[1] < 2 * GROUP_S + 5


def code_everything(rank: Rank, path: str, codecs: list[str]) -> dict[str, tuple[float, float, int]]:
    """For each codec: relative error of the mean, and of several reductions of one vector; bytes of the last."""
    found = {}
    numel = 8_000
    for spec in codecs:
        codec = build_codec(spec)
        route = open_route(paths.build(path))
        shape = (100, 80)
        pieces = [FlatTensor("w", shape, (0, numel))]
        reducer = make_reducer(Coding(codec, route, average=True, seed=3), pieces, "w", torch.empty(numel))
        generator = torch.Generator().manual_seed(rank.index)
        x = torch.randn(numel, generator=generator)
        wanted = x.clone()
        dist.all_reduce(wanted)
        wanted /= rank.world_size
        total, first, sent = torch.zeros(numel), torch.empty(0), 0
        for _ in range(REPEATS):
            y = x.clone()
            sent = reducer.reduce_(y)
            same = y.clone()
            dist.broadcast(same, 0)
            assert torch.equal(same, y), f"{spec}: ranks differ"
            first = y if not first.numel() else first
            total += y
        scale = wanted.norm()
        found[spec] = (float((first - wanted).norm() / scale), float((total / REPEATS - wanted).norm() / scale), sent)
    return found


def _bytes_wanted(spec: str, size: int) -> float:
    codec = build_codec(spec)
    return 2 * (size - 1) / size * 8_000 * codec.bits_per_element(8_000) / 8


FEW = ["int8", "sign", "topk(density=0.05)", "randomk(density=0.1)"]


@pytest.mark.parametrize(
    ("world_size", "path", "codecs"),
    [
        (3, "backend", CODECS),
        (5, "backend", FEW),
        (8, "backend", FEW),
        (4, "hierarchical(group=2)", ["bf16", "int8", "sign", "topk(density=0.05)", "powersgd(rank=2)"]),
    ],
)
def test_every_codec_is_near_the_mean_and_the_same_on_all_ranks(world_size: int, path: str, codecs: list[str]) -> None:
    found = run_ranks(code_everything, world_size, path, codecs, timeout_s=90)
    exact = {"fp16": 1e-3, "bf16": 1e-2, "int8": 0.05}
    for spec in codecs:
        first, mean, sent = found[0][spec]
        assert first < exact.get(spec, 6.0), spec
        if not build_codec(spec).direction and "momentum" not in spec:
            # What was left out comes later (error feedback) or averages out (unbiased): the mean converges.
            assert mean < max(0.9, first / 2) or mean < exact.get(spec, 0.0), (spec, first, mean)
        if path == "backend" and spec in ("fp16", "int8", "topk(density=0.05)", "randomk(density=0.1)", "sign"):
            wanted = _bytes_wanted(spec, world_size)
            framing = 144 * 4 * (world_size - 1)  # gloo's, at most: four messages to or from each of the others
            assert 0.94 * wanted < sent < 1.06 * wanted + framing, spec


def reduce_odd_lengths(rank: Rank) -> list[str]:
    """Lengths below and around the number of ranks: a codec must not hang or differ between ranks."""
    wrong = []
    for spec in ("int8", "topk(density=0.5)", "threshold(density=0.5)", "bf16", "qsgd(levels=7)+huffman"):
        for path in ("backend", "hierarchical(group=2)"):
            for numel in (1, 2, 4, 7):
                coding = Coding(build_codec(spec), open_route(paths.build(path)), average=False)
                x = torch.arange(1.0, numel + 1) * (rank.index + 1)
                make_reducer(coding, _whole("w", numel), "w", x).reduce_(x)
                other = x.clone()
                dist.broadcast(other, 0)
                if not torch.equal(x, other) or not torch.isfinite(x).all():
                    wrong.append(f"{spec} {path} {numel}")
    return wrong


def test_lengths_below_the_number_of_ranks() -> None:
    assert run_ranks(reduce_odd_lengths, 3) == [[]] * 3


def exchange_all_lengths(rank: Rank) -> list[str]:
    """Messages of any lengths, none, whole and in pieces, as each rank has it by itself; returns what was wrong."""
    group = dist.group.WORLD
    assert group is not None
    choose, own, wrong = random.Random(0), random.Random(rank.index), []
    mailbox = Mailbox(group, Ring(range(rank.world_size), rank.index))
    for turn in range(60):
        messages.SLOW_BYTES_PER_S = messages.FAST_BYTES_PER_S = own.choice((0.0, math.inf))
        places = range(rank.world_size)
        lengths = {(i, j): choose.choice((0, 8, 500, 40_000, 70_000, 200_000)) for i in places for j in places}
        sent = {
            j: seal(
                torch.full((lengths[rank.index, j] - 8,), (7 * rank.index + j + turn) % 251, dtype=torch.uint8), True
            )
            for j in mailbox.others()
            if lengths[rank.index, j]
        }
        incoming = {i: lengths[i, rank.index] for i in mailbox.others() if lengths[i, rank.index]}
        for i, message in mailbox.exchange(sent, incoming)[0].items():
            if not (message[8:] == (7 * i + rank.index + turn) % 251).all() or message[0] != 1:
                wrong.append(f"turn {turn} from {i}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages_of_any_length_arrive_whole_however_each_rank_cuts_its_own(world_size: int) -> None:
    assert run_ranks(exchange_all_lengths, world_size) == [[]] * world_size


def overflow(rank: Rank) -> dict[str, bool]:
    """One rank's value is infinite: no rank may take the result for a number."""
    seen = {}
    for spec in ("int8", "sign", "threshold(density=0.5)", "powersgd(rank=1)", "fp16"):
        for path in ("backend", "hierarchical(group=2)"):
            coding = Coding(build_codec(spec), open_route(paths.build(path)), average=True)
            x = torch.ones(4000)
            if rank.index == 1:
                x[17] = torch.inf
            make_reducer(coding, [FlatTensor("w", (50, 80), (0, 4000))], "w", x).reduce_(x)
            seen[f"{spec} {path}"] = bool(torch.isfinite(x).all())
    return seen


def test_an_overflow_on_one_rank_reaches_all() -> None:
    for seen in run_ranks(overflow, 3):
        assert not any(seen.values()), seen
