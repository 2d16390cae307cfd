"""What the hook says it sent is what the kernel counted on the interface, within 5%, for every codec."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import GradientHook
from echelon.compression.registry import examples, read
from echelon.core.errors import UserError
from echelon.launch.link import Host, ShapedNetwork, enter, parse_link, read_counters
from tests.ranks.spawn import Rank, run_ranks

CODECS = [specs[0] for specs in examples().values()] + ["qsgd(levels=7)+huffman", "sign(vote=true)"]
STEPS = 4


def count(rank: Rank, hosts: list[Host]) -> dict[str, tuple[int, int]]:
    """For each codec: bytes by the hook's count, and payload bytes by the kernel's."""
    enter(hosts[rank.index])
    store = dist.FileStore(str(rank.folder / "store"), rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size, timeout=rank.timeout)
    found = {}
    for spec in CODECS:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256)))
        hook = GradientHook(None, read(spec), average=True)
        hook.attach(ddp)
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(rank.index))
        for _ in range(2):  # connections, buckets
            ddp(x).square().sum().backward()
        dist.barrier()
        before, said = read_counters(hosts[rank.index]), hook.wire.total
        for _ in range(STEPS):
            ddp(x).square().sum().backward()
        dist.barrier()  # what the last step sent has left this machine once the other has answered
        found[spec] = (hook.wire.total - said, (read_counters(hosts[rank.index]) - before).sent_payload_bytes)
        hook.close()
    return found


@pytest.mark.root
def test_every_codec_sends_what_it_says() -> None:
    try:
        network = ShapedNetwork(2, parse_link("1gbit"))
    except UserError as error:
        pytest.skip(str(error))
    with network:
        found = run_ranks(count, 2, network.hosts, backend=None, timeout_s=90)
    for spec, (said, counted) in found[0].items():
        assert counted == pytest.approx(said, rel=0.05), (spec, said, counted)
