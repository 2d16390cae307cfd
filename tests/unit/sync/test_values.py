"""What is averaged, and how it is cut into fragments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.collectives.wire import GROUPS, WireCount
from echelon.sync.averaging.fragment import Fragment
from echelon.sync.averaging.plan import AveragingPlan, MeanRule
from echelon.sync.averaging.values import Value, cut, model_values, moments
from echelon.trainer.window import WindowTraffic


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 40)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))


def test_everything_that_is_state_once() -> None:
    values = {v.name: v for v in model_values(Tied())}
    assert sorted(values) == [
        *("embed.weight", "head.bias", "norm.bias", "norm.num_batches_tracked", "norm.running_mean"),
        *("norm.running_var", "norm.weight"),
    ]
    assert [v.group for v in values.values()] == ["weights", "small", "small", "buffers", "buffers", "buffers", "small"]


def test_moments_are_those_with_an_element_per_element() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    assert moments(optimizer, model_values(model)) == []
    model.head(model.norm(model.embed(torch.arange(4)))).sum().backward()
    optimizer.step()
    names = [v.name for v in moments(optimizer, model_values(model)) if v.name.startswith("norm.weight")]
    assert names == ["norm.weight:exp_avg", "norm.weight:exp_avg_sq", "norm.weight:max_exp_avg_sq"]


def test_a_second_moment_that_decayed_to_nothing_is_not_negative() -> None:
    layer = nn.Linear(100, 50, bias=False)
    values = model_values(layer)
    optimizer = torch.optim.RMSprop(layer.parameters())
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()
    plan, fragment = AveragingPlan(period=10, optimizer_state="average"), Fragment(values, None)
    fragment.re_anchor(optimizer, plan)
    square = optimizer.state[layer.weight]["square_avg"]
    square.mul_(1e-12)
    fragment.count(10, 10)
    fragment.start(optimizer, plan, 10, None)
    assert fragment.pending is not None
    means = fragment.pending.means.result()
    assert means is not None
    means["weight:square_avg"] *= 1 + 2e-7  # as a weighted sum rounds
    fragment.apply(MeanRule(), optimizer, plan)
    assert square.min() >= 0 and square.max() < 1e-6


def test_counters_stay_whole() -> None:
    counter = next(v for v in model_values(Tied()) if v.name.endswith("tracked"))
    counter.write(torch.tensor(6.7, dtype=torch.float64))
    assert counter.tensor.item() == 7
    assert counter.read().dtype == torch.float64


@pytest.mark.parametrize("widths", [[1000, 1, 1, 1], [1, 1, 1, 1000], [5] * 9, [1, 900, 1, 900, 1], [3, 3]])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_fragments_hold_each_value_once_in_order(widths: list[int], parts: int) -> None:
    values = model_values(nn.ParameterList([nn.Parameter(torch.zeros(w)) for w in widths]))
    if parts > len(widths):
        with pytest.raises(ValueError, match=f"{parts} fragments"):
            cut(values, parts)
        return
    runs = cut(values, parts)
    assert [v for run in runs for v in run] == values
    assert len(runs) == parts
    assert all(runs)


def test_fragments_are_about_equal() -> None:
    values = model_values(nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(12)]))
    assert [len(run) for run in cut(values, 4)] == [3, 3, 3, 3]


@pytest.mark.parametrize(("period", "fragments"), [(4, 1), (4, 4), (7, 3), (50, 4)])
def test_each_fragment_is_due_once_in_any_period(period: int, fragments: int) -> None:
    plan = AveragingPlan(period, fragments=fragments)
    for first in (1, 3, 12):
        window = range(first, first + period)
        assert all(sum(plan.is_due(p, t) for t in window) == 1 for p in range(fragments))
        assert fragments == 1 or max(sum(plan.is_due(p, t) for p in range(fragments)) for t in window) == 1


def test_moments_of_complex_parameters_are_found() -> None:
    model = nn.ParameterDict(
        {"w": nn.Parameter(torch.ones(3, dtype=torch.complex64)), "b": nn.Parameter(torch.ones(2))}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = {value.name: tuple(value.tensor.shape) for value in moments(optimizer, model_values(model))}
    assert found == {"w:exp_avg": (3, 2), "w:exp_avg_sq": (3, 2), "b:exp_avg": (2,), "b:exp_avg_sq": (2,)}


def test_bytes_of_every_kind_of_value_are_in_the_sum_over_ranks() -> None:
    kinds = ("parameter", "buffer", "moment")
    tensors = torch.zeros(1, 64), torch.zeros(64, 64)
    groups = [Value("", each, kind, each).group for kind in kinds for each in tensors]
    wire = WireCount()
    for group in groups:
        wire.add(group, 10)
    assert sum(WindowTraffic({g: wire.by_group[g] for g in GROUPS}, 0).in_order()) == wire.total == 10 * len(groups)
    with pytest.raises(ValueError, match="unknown groups: pulled"):
        WindowTraffic({"pulled": 1}, 0).in_order()
