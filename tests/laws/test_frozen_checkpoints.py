"""Laws 2 and 10 of checkpoints: what stays as it is lies in one base beside them, and runs resume to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.checkpoint import CheckpointStore, whole
from echelon.core.patience import Patience
from echelon.trainer.saving import RanksState, WriterState
from echelon.trainer.state import Cursor, averaged
from tests.laws.extras import NEEDS_PEFT
from tests.laws.test_layouts import BATCHNORM
from tests.ranks.layouts import Trainer, Trial, make_trainer
from tests.ranks.spawn import Rank, run_ranks

ADAM = {"optimizer.name": "adamw", "optimizer.lr": 0.003}
CUT = {"strategy.cuts": "blocks.1"}  # times that are measured may cut two starts differently
ALONE = Trial("vit", settings={"model.tune": "head", "training.ema": 0.9, **ADAM})
QUICK = (
    Trial("vit", "dp=2", {"model.tune": "head", "training.ema": 0.9, **ADAM}),
    Trial("vit", "fsdp=2", {"model.tune": "last(1)+layer_decay(0.5)", "training.ema": 0.9, **ADAM}),
    Trial("vit", "pp=2,microbatches=2", {"model.tune": "head", "training.ema": 0.9, **CUT, **ADAM}),
    Trial("vit", "dp=2", {"model.tune": "last(1)", "strategy.sync": "local(period=3)", "training.ema": 0.9, **ADAM}),
)
MORE = (
    Trial("vit", "dp=2,zero1", {"model.tune": "norm", **ADAM}),
    Trial("gpt", "tp=2", {"model.tune": "bias"}),
    Trial("resnet", "dp=2", {"model.tune": "head", "training.ema": 0.9, **BATCHNORM}),
    Trial("resnet", "fsdp=2", {"model.tune": "last(2)", **BATCHNORM}),
    Trial("resnet", "dp=2", {"model.tune": "last(2)", "strategy.sync": "diloco(period=3)", **BATCHNORM}),
    Trial("vit", "dp=2", {"model.tune": "last(1)", "strategy.compression": "topk(0.1)", "optimizer.momentum": 0.0}),
)


UNFREEZE = "head+unfreeze(epoch=2)"
THAWED = (
    Trial("vit", "dp=2", {"model.tune": UNFREEZE, "training.ema": 0.9, "strategy.compression": "int8", **ADAM}),
    Trial("vit", "fsdp=2", {"model.tune": UNFREEZE, "training.ema": 0.9, **ADAM}),
    Trial("vit", "tp=2", {"model.tune": UNFREEZE, **ADAM}),
    Trial("vit", "pp=2,microbatches=2", {"model.tune": UNFREEZE, **CUT, **ADAM}),
    Trial("vit", "dp=2", {"model.tune": UNFREEZE, "strategy.sync": "local(period=3, warmup=0)", **ADAM}),
    Trial("resnet", "dp=2", {"model.tune": UNFREEZE, "strategy.sync": "diloco(period=3, warmup=0)", **BATCHNORM}),
)
EVERY_LAYOUT = (("dp=2", ADAM), ("fsdp=2", ADAM), ("tp=2", ADAM), ("pp=2,microbatches=2", {**CUT, **ADAM}))
LORA = (
    *(Trial("vit", layout, {"model.tune": "lora(r=2)", "training.ema": 0.9, **rest}) for layout, rest in EVERY_LAYOUT),
    Trial("vit", "dp=2", {"model.tune": "lora(r=2)", "strategy.sync": "local(period=3)", **ADAM}),
    Trial("vit", "dp=2", {"model.tune": "lora(r=2)", "strategy.sync": "diloco(period=3)", **ADAM}),
    Trial("vit", "dp=2", {"model.tune": "lora(r=2)", "strategy.compression": "topk(0.1)", "optimizer.momentum": 0.0}),
)
LAYERS = (
    *(Trial("vit", layout, {"model.tune": "head", **rest}) for layout, rest in EVERY_LAYOUT[1:3]),
    *(Trial("vit", layout, {"model.tune": "last(1)+layer_decay(0.5)", **rest}) for layout, rest in EVERY_LAYOUT),
)


class RunOfTrial:
    """A trial's trainer with a run's checkpoints."""

    def __init__(self, trial: Trial, rank: Rank | None, folder: Path, epoch: int = 0) -> None:
        self.trainer: Trainer = make_trainer(trial, rank, epoch)
        self.store = CheckpointStore(folder, keep=1)
        self.state = RanksState(self.trainer.parts, self.trainer.world, Patience(10.0))

    def save(self, step: int) -> None:
        while self.state.prepare(self.store, begins=True) is not WriterState.IDLE:
            pass
        with self.state.captured(Cursor(step=step), self.store) as captured:
            if captured is not None:
                self.store.save(step, captured.tree, arriving=captured.arriving, base=captured.base)
        while self.state.prepare(self.store, begins=False) is not WriterState.IDLE:
            pass
        self.state.finish()
        self.store.wait()
        if self.trainer.world.group is not None:
            dist.barrier()

    def restore(self) -> None:
        found = self.state.newest(self.store)
        assert found is not None
        self.state.load(found[1])

    def close(self) -> dict[str, np.ndarray]:
        """Return all that this rank holds, and its average."""
        parts = self.trainer.parts
        parts.sync.close()
        self.store.close()
        held = {name: tensor.detach().numpy().copy() for name, tensor in parts.local_model.state_dict().items()}
        average = parts.ema.state_dict()["average"] if parts.ema else {}
        return held | {f"average of {name}": tensor.numpy().copy() for name, tensor in average.items()}


def resumed(rank: Rank | None, trials: Sequence[Trial], folder: Path) -> None:
    """Train each trial through, and with a stop in the middle."""
    for i, trial in enumerate(trials):
        through = RunOfTrial(trial, rank, folder / f"{i}")
        frozen = through.trainer.parts.frozen
        through.trainer.run(0, 2)
        through.save(2)
        through.trainer.run(2, 5)
        through.save(5)  # without what the one before it had written
        expected = through.close()
        again = RunOfTrial(trial, rank, folder / f"{i}")
        again.restore()
        again.trainer.run(5, 8)
        again.save(8)
        ended = again.close()
        straight = RunOfTrial(trial, rank, folder / f"straight{i}")
        for name, value in straight.trainer.parts.local_model.state_dict().items():
            assert name not in frozen or np.array_equal(value.numpy(), expected[name]), f"{trial}: {name} moved"
        straight.trainer.run(0, 2)
        straight.save(2)  # codecs and clocks see the same calls
        straight.trainer.run(2, 5)
        straight.save(5)
        straight.trainer.run(5, 8)
        wanted = straight.close()
        assert wanted.keys() == ended.keys(), f"{trial}: {sorted(wanted.keys() ^ ended.keys())}"
        for name, value in wanted.items():
            assert np.array_equal(value, ended[name]), f"{trial}: {name}"
        assert not [name for name in wanted if name.removeprefix("average of ") in frozen and "average" in name], trial


def resumed_apart(rank: Rank, trials: Sequence[Trial], folder: Path) -> None:
    """Do the same where each rank has a disk of its own: only rank 0's has checkpoints."""
    own = folder / f"disk{rank.index}"
    resumed(rank, trials, own)
    assert rank.index == 0 or [path.name for path in own.iterdir()] == ["parts"]


def check(trials: Sequence[Trial], folder: Path, ranks: int = 2) -> None:
    if ranks == 1:
        resumed(None, trials, folder)
    else:
        run_ranks(resumed, ranks, trials, folder, timeout_s=300)
    for i, trial in enumerate(trials):
        (base,) = (folder / f"{i}").glob("base-*")
        (step,) = (folder / f"{i}").glob("step-*")
        found = CheckpointStore(folder / f"{i}", keep=1).newest()
        assert found is not None
        model = averaged(whole(found[1]))
        frozen = make_trainer(Trial(trial.model, settings=trial.settings | {"strategy.sync": "allreduce"}), None)
        names = set(frozen.parts.frozen) & set(model)
        size = sum(model[name].nbytes for name in names)
        kept = sum(path.stat().st_size for path in base.glob("*.safetensors"))
        assert size <= kept <= size * 1.2 + 20_000, f"{trial}: {kept} bytes of a base for {size}"
        text = (step / "tree.json").read_text()
        assert not [name for name in names if f'"model.{name}"' in text], f"{trial}: in the checkpoint"


def test_a_checkpoint_leaves_out_what_stays_as_it_is_and_resumes_to_the_bit(tmp_path: Path) -> None:
    check(QUICK, tmp_path)


def test_one_process_too(tmp_path: Path) -> None:
    check([ALONE], tmp_path, ranks=1)


def test_machines_with_disks_of_their_own_resume_to_the_bit_from_what_the_first_one_has(tmp_path: Path) -> None:
    run_ranks(resumed_apart, 2, (QUICK[0], MORE[-1]), tmp_path, timeout_s=300)


@NEEDS_PEFT
@pytest.mark.long
def test_runs_with_adapters_resume_to_the_bit(tmp_path: Path) -> None:
    check(LORA, tmp_path)


@pytest.mark.long
def test_head_and_rates_by_layer_resume_to_the_bit_in_every_layout(tmp_path: Path) -> None:
    check(LAYERS, tmp_path)


@pytest.mark.long
def test_more_checkpoints_leave_out_what_stays_as_it_is(tmp_path: Path) -> None:
    check(MORE, tmp_path)


def test_a_layout_reads_the_base_that_another_wrote(tmp_path: Path) -> None:
    run_ranks(in_another, 2, tmp_path, timeout_s=200)


def in_another(rank: Rank, folder: Path) -> None:
    settings = {"model.tune": "last(1)", **ADAM}
    first = RunOfTrial(Trial("vit", "fsdp=2", settings), rank, folder)
    first.trainer.run(0, 3)
    first.save(3)
    first.close()
    second = RunOfTrial(Trial("vit", "dp=2", settings), rank, folder)
    second.restore()
    second.save(4)
    now = second.close()
    found = CheckpointStore(folder, keep=1).newest()
    assert found is not None and found[0] == 4
    for name, tensor in whole(found[1])["model"].items():
        assert torch.equal(tensor, torch.from_numpy(now[name])), name


def thawed(rank: Rank, trials: Sequence[Trial], folder: Path) -> None:
    """Train each trial over the moment at which more is trained: through, and with stops there and after it."""
    for i, trial in enumerate(trials):
        first = RunOfTrial(trial, rank, folder / f"{i}")
        frozen = first.trainer.parts.frozen
        first.trainer.run(0, 3)
        first.save(3)
        before = first.close()
        through = RunOfTrial(trial, rank, folder / f"{i}", epoch=1)
        through.restore()
        assert not through.trainer.parts.frozen and not through.trainer.parts.optimizer.state
        for name, tensor in through.trainer.parts.local_model.state_dict().items():
            known = before[name] if name in frozen or trial.settings.get("strategy.sync") is None else None
            assert known is None or np.array_equal(tensor.numpy(), known), f"{trial}: {name}"
        through.trainer.run(3, 5)
        through.save(5)
        through.trainer.run(5, 8)
        through.save(8)
        expected = through.close()
        moved = [name for name in frozen & expected.keys() if not np.array_equal(before[name], expected[name])]
        assert moved or not frozen & expected.keys(), trial
        again = RunOfTrial(trial, rank, folder / f"again{i}")
        again.trainer.run(0, 3)
        again.save(3)
        again.close()
        for step, last in ((3, 5), (5, 8)):  # each time from the disk
            again = RunOfTrial(trial, rank, folder / f"again{i}", epoch=1)
            again.restore()
            again.trainer.run(step, last)
            again.save(last)
            ended = again.close()
        for name, value in expected.items():
            assert np.array_equal(value, ended[name]), f"{trial}: {name}"


def test_what_is_unfrozen_later_moves_and_resumes_to_the_bit(tmp_path: Path) -> None:
    run_ranks(thawed, 2, THAWED[:1], tmp_path, timeout_s=300)


@pytest.mark.long
def test_every_choice_unfreezes_and_resumes_to_the_bit(tmp_path: Path) -> None:
    run_ranks(thawed, 2, THAWED[1:], tmp_path, timeout_s=300)
