"""A checkpoint written in any layout loads in any other, bit for bit, and goes on in its own as if nothing had been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import Tensor

from echelon.checkpoint import export_weights
from echelon.core.patience import Patience
from echelon.records.file import Recorder
from echelon.trainer.saving import RanksState, Saver, best_state
from echelon.trainer.state import Cursor, Fingerprint
from tests.ranks.layouts import HeldTensor, Trainer, Trial, assemble, held, make_trainer
from tests.ranks.spawn import Rank, run_ranks

SETTINGS = {"training.ema": 0.9, "optimizer.name": "adamw", "optimizer.lr": 0.003, "model.sync_batchnorm": True}
TABLES = {"training.ema": 0.9, "optimizer.name": "sparse_adam", "optimizer.lr": 0.01, "optimizer.weight_decay": 0.0}
CUTS = {"vit": "blocks.1", "untied_gpt": "blocks.1", "resnet": "blocks.4"}
LAYOUTS = {
    2: ["dp=2", "dp=2,zero1", "fsdp=2", "tp=2,sequence", "pp=2,microbatches=1"],
    4: ["fsdp=2,tp=2", "dp=2,tp=2", "dp=2,fsdp=2", "fsdp=4", "tp=2,pp=2,microbatches=1", "dp=2,pp=2,microbatches=1"],
    8: ["fsdp=2,tp=2,pp=2,microbatches=1", "dp=2,tp=2,pp=2,microbatches=1", "dp=2,fsdp=2,tp=2", "dp=8,zero1"],
}


def _saver(trainer: Trainer, folder: Path) -> Saver:
    state = RanksState(trainer.parts, trainer.world, Patience(folder))
    return Saver(folder, 2, state, Recorder(None), Fingerprint(model=trainer.trial.model))


def save(trainer: Trainer, folder: Path, step: int) -> None:
    """Write a checkpoint of a step."""
    saver = _saver(trainer, folder)
    saver.save(Cursor(step=step), "interval")
    saver.finish()


def load(trial: Trial, rank: Rank | None, folder: Path) -> Trainer:
    """Build a trial's parts, and load a checkpoint of step 4."""
    trainer = make_trainer(trial, rank)
    cursor = _saver(trainer, folder).restore()
    assert cursor is not None and cursor.step == 4
    return trainer


def everything(trainer: Trainer) -> dict[str, HeldTensor]:
    """Return parameters, buffers, averages and moments, each with where it lies."""
    own = held(trainer.parts)
    found = dict(own)
    assert trainer.parts.ema is not None
    for name, tensor in trainer.parts.ema.state_dict()["average"].items():
        found[f"{name}:average"] = HeldTensor(tensor.numpy().copy(), own[name].region)
    for name, parameter in trainer.parts.local_model.named_parameters():
        for key, value in trainer.parts.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.ndim:
                found[f"{name}:{key}"] = HeldTensor(value.numpy().copy(), own[name].region)
    return found


def _settings(model: str) -> Mapping[str, Any]:
    return TABLES if model == "tables" else SETTINGS


def _trial(model: str, layout: str) -> Trial:
    """Cut pipelines by hand: balanced by measured time, they could be cut elsewhere the next time."""
    return Trial(model, layout, {**_settings(model), **({"strategy.cuts": CUTS[model]} if "pp" in layout else {})})


def _write_all(rank: Rank, model: str, layouts: Sequence[str], folder: Path) -> list[dict[str, HeldTensor]]:
    """Load what one process wrote into each layout, write it from there; go on once from there, once after a save."""
    seen = []
    for layout in layouts:
        trial = _trial(model, layout)
        trainer = load(trial, rank, folder / "alone")
        seen.append(everything(trainer))
        save(trainer, folder / layout, 4)
        trainer.run(4, 7)
        again = load(trial, rank, folder / layout)
        again.run(4, 7)
        assert again.losses == trainer.losses, f"{layout}: a resumed run goes on otherwise"
        for name, values in everything(trainer).items():
            assert np.array_equal(values.values, everything(again)[name].values), f"{layout} resumed: {name}"
    return seen


def _read_all(rank: Rank, model: str, layouts: Sequence[str], folder: Path) -> list[dict[str, HeldTensor]]:
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    return [everything(load(_trial(model, layout), rank, path)) for layout in layouts for path in folders]


def _compare(expected: dict[str, np.ndarray], ranks: Sequence[Sequence[dict[str, HeldTensor]]]) -> None:
    for i in range(len(ranks[0])):
        whole = assemble([rank[i] for rank in ranks])
        assert whole.keys() >= expected.keys()
        for name, values in expected.items():
            assert np.array_equal(whole[name], values), name


def check_reload(model: str, layouts: dict[int, list[str]], folder: Path) -> None:
    """Write in one process and in each layout; read all of these in each layout and in one process."""
    alone = make_trainer(Trial(model, "dp=1", _settings(model)), None)
    alone.run(0, 4)
    save(alone, folder / "alone", 4)
    expected = assemble([everything(alone)])
    for world, names in layouts.items():
        _compare(expected, run_ranks(_write_all, world, model, names, folder, timeout_s=100 * world))
    for world, names in layouts.items():
        _compare(expected, run_ranks(_read_all, world, model, names, folder, timeout_s=100 * world))
    for path in [path for path in folder.iterdir() if path.is_dir()]:
        _compare(expected, [[everything(load(Trial(model, "dp=1", _settings(model)), None, path))]])
        export_weights(best_state(path)["model"], path / "weights.safetensors")
        weights = load_file(path / "weights.safetensors")
        assert all(np.array_equal(values, expected[name]) for name, values in weights.items())
        assert len(weights) == len(alone.parts.model.state_dict())


@pytest.mark.long
def test_each_layout_reads_what_each_other_wrote(tmp_path: Path) -> None:
    check_reload("vit", {2: ["dp=2,zero1", "fsdp=2", "tp=2,sequence", "pp=2,microbatches=1"]}, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("model", ["vit", "untied_gpt", "resnet"])
def test_each_layout_reads_what_each_other_wrote_on_more_ranks(tmp_path: Path, model: str) -> None:
    check_reload(model, {n: [t.removesuffix(",sequence") for t in LAYOUTS[n]] for n in (2, 4, 8)}, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_split_replicas_that_average_resume_in_the_middle_of_a_period(tmp_path: Path) -> None:
    settings = {**SETTINGS, "strategy.sync": "local(3)", "strategy.compression": "topk(0.2)"}
    run_ranks(_resume, 4, [Trial("vit", layout, settings) for layout in ("dp=2,tp=2", "dp=2,fsdp=2")], tmp_path)


def _resume(rank: Rank, trials: Sequence[Trial], folder: Path) -> None:
    for trial in trials:
        first = make_trainer(trial, rank)
        first.run(0, 4)
        save(first, folder / trial.parallel, 4)
        first.run(4, 9)
        again = load(trial, rank, folder / trial.parallel)
        again.run(4, 9)
        assert again.losses == first.losses[4:], f"{trial.parallel}: a resumed run goes on otherwise"
