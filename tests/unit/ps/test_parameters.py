"""A worker's parameters and the keys' values: the same elements, however they lie in memory."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from echelon.observe.phases import HostClock
from echelon.ps.client import Client
from echelon.ps.spans import model_table
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut
from echelon.sync.ps import ServerSettings


def test_values_are_those_of_the_elements_in_channels_last_too() -> None:
    """A key that ends inside a parameter, and parameters whose memory has another order than their elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    table = model_table(model, Cut(servers=2, chunk_bytes=400))
    server = ParameterServer(model, table, cast(Client, None), WorkerOptions(ServerSettings(), 0.0, HostClock()))
    before = [p.detach().clone() for p in model.parameters()]
    values = server.key_values()
    assert torch.equal(torch.cat([values[k.index] for k in table.keys]), torch.cat([p.reshape(-1) for p in before]))
    server.set_parameters({index: 2 * value for index, value in values.items()})
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, 2 * old)
    assert next(model.parameters()).is_contiguous(memory_format=torch.channels_last)
