"""Chains, cuts, stages, shapes, batches and schedules of pipelines: without processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints, Style
from echelon.models import hints_for
from echelon.models.base import ModelInput
from echelon.models.builtin.resnet20 import build as build_resnet20
from echelon.models.builtin.small_gpt import SmallGPT, TextSize
from echelon.models.builtin.small_vit import Size, SmallViT
from echelon.parallel.pipeline import PipelineSettings
from echelon.parallel.pipeline.batches import cut_batch, dividing_count
from echelon.parallel.pipeline.chain import units_of
from echelon.parallel.pipeline.cuts import balanced, measure_units, stages_of
from echelon.parallel.pipeline.find_chain import find_chain
from echelon.parallel.pipeline.plan import plan_stages
from echelon.parallel.pipeline.settings import SCHEDULES, microbatch_count, stage_count
from echelon.parallel.pipeline.stage import Skeleton, make_stage
from echelon.parallel.pipeline.timeline import ActionRecorder
from echelon.parallel.pipeline.torch_stage import moved_ahead
from echelon.parallel.tensor import plan_tensor
from echelon.records.kinds import PipelineAction, idle_share

IMAGES = ModelInput(10, 3, 32)
CPU = torch.device("cpu")


def timm_model(name: str, **options: object) -> nn.Module:
    """Build a model of timm without weights."""
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10, **options)
    return model


def torchvision_resnet() -> nn.Module:
    """Build torchvision's smallest ResNet."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=10)
    return model


def small_gpt(tied: bool) -> nn.Module:
    """Build a tiny language model."""
    return SmallGPT(TextSize(vocabulary=16, context=8, tied=tied), Size(2, 16, 2, 16))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "resnet20": lambda: build_resnet20(IMAGES),
    "small_vit": lambda: SmallViT(IMAGES, Size(depth=3)),
    "torchvision resnet18": torchvision_resnet,
    "timm resnet18": lambda: timm_model("resnet18"),
    "timm vit": lambda: timm_model("vit_tiny_patch16_224", img_size=32, depth=2),
    "timm vit with registers": lambda: timm_model("vit_small_patch14_reg4_dinov2", img_size=28, depth=2),
    "timm convnext": lambda: timm_model("convnext_atto"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stages_one_after_the_other_are_the_model(family: str) -> None:
    """Cut at every block: the same logits, every parameter and buffer in one stage under its own name, right shapes."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    side = 28 if "registers" in family else 32
    x = images = torch.randn(2, 3, side, side)
    units = units_of(find_chain(model, hints_for(model)))
    stages = stages_of(units, range(1, len(units)))
    between = [each for (each,) in Skeleton(model, stages, x).boundaries(x)]
    names: list[str] = []
    with torch.no_grad():
        for number, steps in enumerate(stages):
            stage = make_stage(model, steps, number == 0, number == len(stages) - 1)
            names += stage.state_dict()
            assert tuple(x.shape) == between[number].shape
            x = stage(x)
        assert torch.equal(x, model(images))
    assert between[-1].shape == (2, 10)
    assert sorted(names) == sorted(model.state_dict())


def test_shapes_under_autocast_are_those_of_the_type() -> None:
    """A stage sends what autocast makes of it."""
    model = SmallViT(IMAGES, Size(depth=1))
    units = units_of(find_chain(model, hints_for(model)))
    skeleton = Skeleton(model, stages_of(units, [1]), images := torch.zeros(4, 3, 32, 32))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        sent = model.embed(images)
    for types in ((torch.bfloat16, None), (None, torch.bfloat16)):
        narrow = [each for (each,) in skeleton.boundaries(images, types)]
        assert narrow[1].dtype == (sent.dtype if types[0] else torch.bfloat16)
        assert narrow[2].dtype == torch.bfloat16
    assert skeleton.boundaries(images)[2][0].dtype == torch.float32


def test_a_model_on_the_meta_device_is_measured_and_cut() -> None:
    """One block at a time is made real: the whole never is."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    plan = plan_stages(model, None, PipelineSettings("gpipe"), 2, torch.zeros(4, 32))
    assert [stage.rank for stage in plan] == [0, 1]
    assert [len(stage.steps) for stage in plan] == [3, 3]
    assert all(p.is_meta for p in model.parameters())
    assert "0 to 2: 3,168 parameters" in str(plan[0]) and "ms a micro-batch" in str(plan[0])


def test_blocks_of_one_structure_have_one_time() -> None:
    """Noise does not move a cut between equal blocks; a larger block takes longer."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)], nn.Linear(16, 2048), nn.Linear(2048, 2048))
    before = [p.clone() for p in model.parameters()]
    times = measure_units(model, units_of(find_chain(model, None)), torch.zeros(64, 16))
    assert times[0] == times[1] == times[2] < times[4]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_no_stage_begins_between_layers_that_tensor_parallelism_splits_as_a_pair() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    styles = plan_tensor(model, 2, None, {"0": Style("column"), "2": Style("row")}, False).styles
    assert [unit.name for unit in units_of(find_chain(model, None), styles)] == ["0", "3", "4"]
    by_hand = PipelineSettings("gpipe", cuts=("2",), styles=styles)
    with pytest.raises(UserError, match=r"cannot begin with '2': .*one can with 3, 4"):
        plan_stages(model, None, by_hand, 2, torch.zeros(4, 8))


def test_cuts_balance_the_longest_stage() -> None:
    """The best partition, also where a greedy one would miss it."""
    assert balanced([1, 1, 1, 1], 2) == (2,)
    assert balanced([1, 2, 3, 4, 5], 3) == (3, 4)
    assert balanced([9, 1, 1, 1], 4) == (1, 2, 3)


def test_a_batch_is_filled_up_and_targets_are_not() -> None:
    """What is added has no targets; without targets one sample stands for all."""
    parts = cut_batch(torch.arange(1, 6).view(5, 1), torch.arange(1, 6), 4)
    assert [part.flatten().tolist() for part in parts.inputs] == [[1, 2], [3, 4], [5, 5], [5, 5]]
    assert [part.tolist() for part in parts.targets] == [[1, 2], [3, 4], [5], []]
    empty = cut_batch(torch.ones(1, 3), torch.zeros(0), 2)
    assert [part.tolist() for part in empty.inputs] == [[[1.0] * 3]] * 2 and not any(map(len, empty.targets))
    assert [dividing_count(n, 4, None, CPU) for n in (8, 6, 5, 3, 1, 0)] == [4, 3, 1, 3, 1, 1]


def test_a_computation_that_fails_is_over_too() -> None:
    recorder, told = ActionRecorder(CPU), []
    recorder.on_change = told.append
    with pytest.raises(ZeroDivisionError), recorder.action(0, 0, "backward"):
        raise ZeroDivisionError
    assert told == ["backward", None]


def test_idle_share_of_a_timeline() -> None:
    """Two ranks, each busy half of the time."""
    actions = [PipelineAction(0, 0, 0, "forward", 0, 1), PipelineAction(1, 1, 0, "forward", 1, 2)]
    assert idle_share(actions, 2) == 0.5


class Tangled(nn.Module):
    """No chain that anyone declared."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


class HalfDeclared(nn.Module):
    """Its chain leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


class Peeks(nn.Module):
    """A block whose forward pass depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Double large inputs."""
        return self.layer(x * 2 if float(x.sum()) > 1 else x)


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "no chain": (
        lambda: find_chain(Tangled(), None),
        r"Tangled is not known to be a chain of blocks \(it calls no",
    ),
    "a layer that no step has": (
        lambda: find_chain(HalfDeclared(), Hints(chain=("a",))),
        "b.weight belongs to no step",
    ),
    "a method that is not there": (lambda: find_chain(HalfDeclared(), Hints(chain=("a", ":b2"))), "names :b2"),
    "more stages than blocks": (
        lambda: stage_count(PipelineSettings("gpipe"), 4, 3),
        "needs 4 stages, and the model has 3 blocks .* use pp=3 or less",
    ),
    "two stages per rank where there are blocks for one": (
        lambda: stage_count(PipelineSettings("interleaved"), 4, 6),
        "needs 8 stages, and the model has 6 blocks .* use pp=3 or less, or schedule=1f1b",
    ),
    "two stages per rank, cut for one": (
        lambda: stage_count(PipelineSettings("zero_bubble", cuts=("blocks.2",)), 2, 8),
        "needs 2 stages per rank, that is 4 or a multiple in all; cuts at blocks.2 make 2: give 3 cuts",
    ),
    "one stage per rank, cut for two": (
        lambda: stage_count(PipelineSettings("1f1b", cuts=("1", "2", "3")), 2, 8),
        "needs 1 stages per rank, that is 2 in all",
    ),
    "an unknown schedule": (
        lambda: stage_count(PipelineSettings("1b1f"), 2, 8),
        "schedule=1b1f: unknown schedule .*1f1b",
    ),
    "more micro-batches than samples": (
        lambda: microbatch_count(PipelineSettings("gpipe", 8, samples=5), 2, 2),
        "a batch has 5 samples on each rank",
    ),
    "micro-batches that do not divide the batch": (
        lambda: microbatch_count(PipelineSettings("1f1b", 5, samples=32), 2, 2),
        "5 micro-batches do not divide the 32 samples .* use microbatches=4, or a --batch-size that they divide",
    ),
    "micro-batches that interleaving cannot group": (
        lambda: microbatch_count(PipelineSettings("interleaved", 5), 2, 4),
        "use a multiple of 2, such as 4",
    ),
    "too few micro-batches for dualpipev": (
        lambda: microbatch_count(PipelineSettings("dualpipev", 2), 2, 4),
        "at least as many micro-batches as stages: microbatches=4",
    ),
    "tied weights over stages": (
        lambda: plan_stages(
            small_gpt(True), hints_for(small_gpt(True)), PipelineSettings(cuts=("blocks.1",)), 2, torch.zeros(1)
        ),
        "head.weight and embedding.weight of SmallGPT are one tensor, used by stages 1 and 0",
    ),
    "a cut at no block": (
        lambda: plan_stages(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None, cut_at("7"), 2, torch.zeros(1)),
        "cannot begin with '7'",
    ),
    "a cut before everything": (
        lambda: plan_stages(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None, cut_at("0"), 2, torch.zeros(1)),
        "name the blocks that the second and later stages begin with",
    ),
    "a forward pass that depends on values": (lambda: shapes_of(nn.Sequential(Peeks(), Peeks())), "cannot run by"),
}


def cut_at(*names: str) -> PipelineSettings:
    """Return settings with cuts by hand."""
    return PipelineSettings("gpipe", cuts=names)


def shapes_of(model: nn.Module) -> object:
    """Find the shapes between a model's children."""
    units = units_of(find_chain(model, None))
    inputs = torch.zeros(2, 4)
    return Skeleton(model, stages_of(units, [1]), inputs).boundaries(inputs)


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals_are_in_words(what: str) -> None:
    """One line that names the cause and the fix."""
    action, words = REFUSALS[what]
    with pytest.raises(UserError, match=words) as refused:
        action()
    assert "\n" not in str(refused.value)


def test_every_schedule_is_torchs() -> None:
    """The names in the table exist."""
    from torch.distributed.pipelining import schedules

    assert all(hasattr(schedules, kind.torch_name) for kind in SCHEDULES.values())


def test_receives_move_ahead_of_what_they_wait_beside() -> None:
    """Before the second computation before them; they keep their order, and so do all others."""
    from torch.distributed.pipelining.schedules import _Action

    actions = [_Action.from_str(text) for text in ("1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1", "1F1", "1F2", "1RECV_B0")]
    names = [str(action) for action in moved_ahead([*actions, _Action.from_str("1RECV_B1")])]
    assert names == ["1RECV_F0", "1RECV_F1", "1F0", "1SEND_F0", "1RECV_B0", "1RECV_B1", "1F1", "1F2"]
