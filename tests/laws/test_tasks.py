"""What every task obeys, trained by its `auto` model on the data of `tests/ranks/task_data.py`.

Sums in float64, and without dropout, whose draws are each rank's own: layouts then differ by rounding alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.config import build
from echelon.core.errors import UserError
from echelon.core.patience import Patience
from echelon.data import LoaderConfig, Shard, example_samples
from echelon.data.base import Batch
from echelon.data.loader import EvalLoader, TrainLoader
from echelon.forecast.memory import try_out
from echelon.models import build_model
from echelon.observe.phases import HostClock
from echelon.records.file import Recorder
from echelon.run.resolve import resolve
from echelon.tasks import nest
from echelon.tasks.registry import TASKS
from echelon.trainer.evaluate import evaluate
from echelon.trainer.inputs import model_input, units_of
from echelon.trainer.parts import build_parts
from echelon.trainer.saving import RanksState, Saver
from echelon.trainer.state import Cursor, Fingerprint, RunParts, seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from tests.ranks.layouts import HeldTensor, assemble, held, make_world
from tests.ranks.runs import Runs
from tests.ranks.spawn import Rank, run_ranks
from tests.ranks.task_data import MAKERS, NO_DATA, VARIANTS, Settings

LAYOUTS = ("dp=2", "fsdp=2", "tp=2", "pp=2,microbatches=2")
MIXED = ("dp=2,fsdp=2", "dp=2,tp=2", "dp=2,pp=2,microbatches=2", "fsdp=2,tp=2", "tp=2,pp=2,microbatches=2")
STRATEGIES = [("local(4)", "none"), ("allreduce", "topk(0.1)")]
MORE_STRATEGIES = [("diloco(period=4)", "none"), ("allreduce", "sign"), ("allreduce", "powersgd")]
REFUSED = {
    *(("recommendation", axis) for axis in ("tp=2", "pp=2")),  # a product of two tables of embeddings
    ("segmentation", "pp=2"),  # SmallUNet joins what lies far apart
    ("text_classification", "pp=2"),  # TextClassifier pools over what the mask shows
    ("translation", "pp=2"),  # SmallSeq2Seq has two inputs
}
"""Tasks and layouts that their `auto` models are refused in, in words; in a mixed layout by any of its axes."""
STEPS, LEARNING_STEPS, BATCH = 3, 16, 8
TOLERANCE = 1e-9  # as for images (`test_layouts.py`)


@dataclass
class Trained:
    """What a rank found: losses of global batches, what it holds at the end, and the evaluation.

    Attributes:
        refused: why the task's model does not train like this, in words.
    """

    losses: list[float] = field(default_factory=list)
    held: dict[str, HeldTensor] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    samples: int = 0
    refused: str = ""
    failed: str = ""


Way = tuple[str, str, str]
"""Layout, strategy, compression."""
Case = tuple[str, Settings]
"""A task, after a comma what it learns of data of a certain kind, and where its data is."""


class TaskTrainer:
    """One rank's parts of a run of a task, in float64."""

    def __init__(self, rank: Rank | None, case: Case, way: Way) -> None:
        parallel, sync, codec = way
        settings: dict[str, object] = {"data.batch_size": BATCH, "data.loaders": 0, "data.holdout": 0.2}
        settings |= {"strategy.parallel": parallel, "strategy.sync": sync, "strategy.compression": codec}
        settings |= {"optimizer.name": "adamw", "optimizer.lr": 3e-3, "task": _flag(case[0])}
        self.config = build(None, {**settings, **case[1]}).config
        self.world = make_world(self.config, rank)
        resolved = resolve(self.config)
        seed_everything(0)
        source = resolved.source.open()
        self.task = resolved.task.fitted(source.info)
        loading = LoaderConfig.of(self.config.data, 0, self.world.device)
        shard = Shard(self.world.data_rank, self.world.data_size)
        self.train_loader = TrainLoader(source, loading, shard, units_of(self.task))
        self.eval_loader, self.eval_size = EvalLoader(source, loading, shard), source.info.eval_size
        model = build_model(self.config.model, model_input(source.info, self.task)).double()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        clock = HostClock()
        work = Work(source.info, self.task, model, example_samples(source)[0])
        self.parts: RunParts = build_parts(resolved, work, self.world, clock)
        settings_of_step = StepSettings(self.world.device, None, 1, 0.0, False, self.world.data_group)
        self.step = Step(self.task, settings_of_step, clock, self.parts.scaler, self.parts.split)

    def run(self, first: int, last: int) -> list[float]:
        """Take the steps from `first` to `last`, exclusive; returns the loss of each global batch."""
        losses = []
        for number in range(first, last):
            epoch, place = divmod(number, self.train_loader.batches_per_epoch)
            batch = next(iter(self.train_loader.epoch(epoch, place)))
            result = self.step.forward_backward(_double(batch), self.parts.sync)
            loss = result.loss.double() * self.world.counts
            if self.world.group is not None:
                dist.all_reduce(loss)
            self.parts.sync.step()
            losses.append(float(loss))
        return losses

    def evaluation(self) -> tuple[Mapping[str, float | None], int]:
        """Return metrics, and how many samples they are of."""
        loader = _DoubleLoader(self.eval_loader)
        with self.parts.sync.agreed():
            report = evaluate(self.parts.model, loader, self.task, self.world)  # type: ignore[arg-type]
        assert report.samples == self.eval_size, "each sample once"
        return {"loss": report.loss, **report.metrics}, report.samples

    def saver(self, folder: Path) -> Saver:
        """Return what writes and reads this rank's checkpoints."""
        state = RanksState(self.parts, self.world, Patience(folder))
        return Saver(folder, 2, state, Recorder(None), Fingerprint(model="a task's"))


def _flag(name: str) -> str:
    return name.partition(",")[0].replace("_", "-")


def _double(batch: Batch) -> Batch:
    batch.inputs, batch.targets = nest.map_leaves(_widened, (batch.inputs, batch.targets))
    return batch


def _widened(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


class _DoubleLoader:
    """An evaluation loader whose floating-point numbers are float64."""

    def __init__(self, loader: EvalLoader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Any:
        return map(_double, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def example(self) -> nest.Nest:
        return nest.map_leaves(_widened, self._loader.example())


def train(rank: Rank | None, cases: Sequence[Case], ways: Sequence[Way], steps: int) -> list[Trained]:
    """Train each task in each way; one that fails says so in its own place, and the others run on."""
    found = []
    for case in cases:
        for way in ways:
            try:
                trainer = TaskTrainer(rank, case, way)
                losses = trainer.run(0, steps)
                metrics, samples = trainer.evaluation()
                found.append(Trained(losses, held(trainer.parts), metrics, samples))
                trainer.parts.sync.close()
            except UserError as error:
                found.append(Trained(refused=str(error)))
            except Exception:  # noqa: BLE001 - the test shows it
                found.append(Trained(failed=f"{case[0]} {way}: {traceback.format_exc()}"))
    return found


def resume(rank: Rank, cases: Sequence[Case], folder: Path) -> list[bool]:
    """Stop each task after two of four steps, and go on in new parts; returns whether no bit differs."""
    same = []
    for case in cases:
        way, kept = ("dp=2", "allreduce", "none"), folder / case[0]
        whole = TaskTrainer(rank, case, way)
        losses = whole.run(0, 2)
        saver = whole.saver(kept)
        saver.save(Cursor(step=2), "interval")
        saver.finish()
        losses = whole.run(2, 4)
        again = TaskTrainer(rank, case, way)
        assert again.saver(kept).restore() is not None
        resumed, state = again.run(2, 4), held(again.parts)
        bits = all(np.array_equal(piece.values, state[n].values) for n, piece in held(whole.parts).items())
        same.append(bits and resumed == losses)
        whole.parts.sync.close()
        again.parts.sync.close()
    return same


def _case(name: str, folder: Path) -> Case:
    return name, {**(MAKERS | VARIANTS)[name](folder), "data.root": str(folder / "cache")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    names = [name for name in (*MAKERS, *VARIANTS) if name.partition(",")[0] in TASKS.names()]
    return [_case(name, tmp_path_factory.mktemp("data")) for name in names]


@pytest.fixture(scope="module")
def alone(cases: list[Case]) -> list[Trained]:
    """Each task on one process, which also trains the tokenisers."""
    return train(None, cases, [("dp=1", "allreduce", "none")], STEPS)


@pytest.mark.parametrize("name", TASKS.names())
def test_every_task_has_tiny_data(name: str) -> None:
    assert name in MAKERS or name in NO_DATA, "add what makes its data to tests/ranks/task_data.py"


def check_same(cases: Sequence[Case], alone: Sequence[Trained], ways: Sequence[Way], count: int = 2) -> list[str]:
    """Compare each way of `count` ranks with one process; returns what was refused."""
    ranks = run_ranks(train, count, cases, ways, STEPS, timeout_s=200 * count)
    wrong, refused = [], []
    for i, ((name, _), one) in enumerate(zip(cases, alone, strict=True)):
        assert not one.failed and not one.refused, one
        for j, way in enumerate(ways):
            both = [rank[i * len(ways) + j] for rank in ranks]
            if failed := next((each.failed for each in both if each.failed), ""):
                wrong.append(failed)
            elif both[0].refused:
                refused.append(f"{name} {way[0]}: {both[0].refused}")
            else:
                wrong += _differences(f"{name} {way[0]}", both, one)
    assert not wrong, "\n".join(wrong)
    return refused


def _differences(what: str, both: Sequence[Trained], one: Trained) -> list[str]:
    found = []
    pieces, whole = assemble([each.held for each in both]), assemble([one.held])
    for each in both:
        if not np.allclose(each.losses, one.losses, rtol=0, atol=TOLERANCE):
            found.append(f"{what}: losses {each.losses} are {one.losses} on one process")
        for metric, value in one.metrics.items():
            other = each.metrics[metric]
            if (value is None) != (other is None) or (value is not None and abs(value - other) > 1e-6):  # type: ignore[operator]
                found.append(f"{what}: {metric} {other} is {value} on one process")
    off = [n for n in whole if np.abs(pieces[n].astype(float) - whole[n].astype(float)).max(initial=0) > 1e-6]
    return found + ([f"{what}: {off} differ from one process"] if off else [])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_task_in_every_layout_is_one_process(cases: list[Case], alone: list[Trained]) -> None:
    refused = check_same(cases, alone, [(layout, "allreduce", "none") for layout in LAYOUTS])
    found = {(_task_of(each), axis) for each in refused for axis in _axes(each) if axis != "microbatches=2"}
    assert found == REFUSED, f"new: {sorted(found - REFUSED)}; not any more: {sorted(REFUSED - found)}; {refused}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_task_in_mixed_layouts_is_one_process(cases: list[Case], alone: list[Trained]) -> None:
    refused = check_same(cases, alone, [(layout, "allreduce", "none") for layout in MIXED], count=4)
    new = [each for each in refused if not any((_task_of(each), axis) in REFUSED for axis in _axes(each))]
    assert not new, new


def _task_of(refusal: str) -> str:
    """Return the task that a refusal is of, without its kind of data."""
    return refusal.partition(" ")[0].rstrip(",")


def _axes(refusal: str) -> list[str]:
    """Return the axes of the layout that a task was refused for, such as `tp=2`."""
    return refusal.partition(":")[0].split(" ")[-1].split(",")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_memory_of_every_task_is_forecast(cases: list[Case]) -> None:
    for name, settings in cases:
        described = {**settings, "data.batch_size": BATCH, "task": _flag(name), "optimizer.name": "adamw"}
        told = try_out(resolve(build(None, described).config), workers=1, ranks=1).forecast
        assert not told.unknown, f"{name}: {told.unknown}"
        (memory,) = told.memory
        assert memory.activations > 0 and memory.peak >= 4 * memory.parameters, f"{name}: {memory}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_task_resumes_bit_for_bit(cases: list[Case], alone: list[Trained], tmp_path: Path) -> None:
    for same in run_ranks(resume, 2, cases, tmp_path, timeout_s=300):
        assert all(same), [name for (name, _), each in zip(cases, same, strict=True) if not each]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strategies",
    [pytest.param(STRATEGIES, marks=pytest.mark.long), pytest.param(MORE_STRATEGIES, marks=pytest.mark.slow)],
)
def test_every_task_learns_with_every_strategy_and_codec(
    cases: list[Case], alone: list[Trained], strategies: Sequence[tuple[str, str]]
) -> None:
    ways = [("dp=2", sync, codec) for sync, codec in strategies]
    trained = run_ranks(train, 2, cases, ways, LEARNING_STEPS, timeout_s=400)[0]
    for i, each in enumerate(trained):
        what = f"{cases[i // len(ways)][0]}, {ways[i % len(ways)]}"
        assert not each.failed and not each.refused, each.failed or each.refused
        # The median: where all is learnt, a spectrogram that lacks much by augmentation has a large loss now and then.
        assert np.median(each.losses[-6:]) < each.losses[0], f"{what}: {each.losses}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", [*MAKERS, *VARIANTS])
def test_every_task_learns_from_servers(name: str, mode: str, tmp_path: Path) -> None:
    named: Callable[[str], str] = lambda key: "--" + key.rpartition(".")[2].replace("_", "-")  # noqa: E731
    settings = {key: str(value) for key, value in (MAKERS | VARIANTS)[name](tmp_path).items() if value}
    source, model = settings.pop("data.source"), settings.pop("model.name", "auto")
    flags = [word for key, value in settings.items() for word in (named(key), value)]
    with Runs(tmp_path) as runs:
        run = runs.train(
            source, "--task", _flag(name), "--model", model, *flags, "--workers", "2", "--sync",
            f"ps(mode={mode})", "--batch-size", "8", "--max-steps", "24", "--epochs", "24", "--optimizer", "adamw",
            "--lr", "3e-3", "--loaders", "0", folder="run",
        )  # fmt: skip
        assert run.end(250) == 0, run.text()
    losses = list(run.losses().values())
    assert np.median(losses[-6:]) < losses[0], losses
