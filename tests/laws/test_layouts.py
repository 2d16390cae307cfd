"""Law 1, same function: any layout gives the losses and the parameters of one process, in float64 within 1e-9.

One start of the ranks trains in many layouts, for starting costs more than training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.config import build
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.work import Work
from tests.ranks.layouts import INFO, TASK, HeldTensor, Trial, assemble, held, make_trainer, make_world
from tests.ranks.spawn import Rank, run_ranks

STEPS = 20
CLIPPED: Mapping[str, Any] = {"optimizer.clip_norm": 0.5, "training.accumulate": 2, "optimizer.name": "adamw",
                              "optimizer.lr": 0.003}  # fmt: skip
AVERAGED: Mapping[str, Any] = {"training.ema": 0.9, "optimizer.clip_norm": 0.3}
BATCHNORM: Mapping[str, Any] = {"model.sync_batchnorm": True, "optimizer.clip_norm": 1.0}

QUICK = {
    2: [
        Trial("vit", "fsdp=2", CLIPPED),
        Trial("vit", "tp=2,sequence", AVERAGED),
        Trial("resnet", "tp=2", BATCHNORM),
        Trial("vit", "dp=2", CLIPPED, deals=((3, 1), (1, 7), (0, 1))),
        Trial("resnet", "fsdp=2", BATCHNORM, deals=((3, 1), (1, 7))),
    ],
    4: [
        Trial("gpt", "fsdp=2,tp=2", CLIPPED),
        Trial("vit", "tp=2,pp=2", AVERAGED),
    ],
}
MORE = {
    2: [
        Trial("vit", "dp=2,zero1", {**CLIPPED, **AVERAGED}),
        Trial("gpt", "fsdp=2"),
        Trial("resnet", "fsdp=2", BATCHNORM),
        Trial("gpt", "tp=2", AVERAGED),
        Trial("vit", "pp=2,microbatches=2", CLIPPED),
        Trial("untied_gpt", "pp=2,schedule=gpipe,microbatches=4", AVERAGED),
        Trial("resnet", "pp=2,microbatches=1", BATCHNORM),
        Trial("gpt", "fsdp=2", {"training.recompute": "selective"}),
        Trial("resnet", "dp=2", {"training.recompute": "blocks", **BATCHNORM}),
    ],
    4: [
        Trial("vit", "dp=2,fsdp=2", AVERAGED),
        Trial("resnet", "dp=2,tp=2", BATCHNORM),
        Trial("vit", "fsdp=2,pp=2", CLIPPED),
        Trial("untied_gpt", "dp=2,pp=2", CLIPPED),
        Trial("vit", "dp=2,fsdp=2", AVERAGED, deals=((3, 1, 2, 2), (1, 5, 1, 1))),
        Trial("untied_gpt", "dp=2,pp=2", CLIPPED, deals=((3, 1), (1, 7))),
        Trial("vit", "dp=2,tp=2", CLIPPED, deals=((3, 1), (1, 7))),
        Trial("resnet", "dp=4", BATCHNORM, deals=((3, 1, 2, 2), (1, 5, 1, 1))),
    ],
}


Trained = tuple[list[float], dict[str, HeldTensor]]
"""A trial's losses, and what one rank holds at the end."""


def train(rank: Rank, trials: Sequence[Trial], steps: int) -> list[Trained]:
    """Train each trial; returns what became of them on this rank."""
    seen = []
    for trial in trials:
        trainer = make_trainer(trial, rank)
        trainer.run(0, steps)
        seen.append((trainer.losses, held(trainer.parts)))
        trainer.parts.sync.close()
    return seen


def _alone(trial: Trial, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    trainer = make_trainer(Trial(trial.model, "dp=1", trial.settings, trial.sizes), None)
    trainer.run(0, steps)
    return trainer.losses, assemble([held(trainer.parts)])


def check_same_function(trials: Sequence[Trial], world: int, steps: int = STEPS, timeout_s: float = 120) -> None:
    """Train each trial on `world` ranks and alone, and compare losses and final parameters and statistics."""
    ranks = run_ranks(train, world, trials, steps, timeout_s=timeout_s)
    for i, trial in enumerate(trials):
        _compare(trial, [rank[i] for rank in ranks], steps)


def _compare(trial: Trial, ranks: Sequence[Trained], steps: int = STEPS) -> None:
    """Compare a trial with the same training in one process. Micro-batches count more batches: that is left out."""
    losses, parameters = _alone(trial, steps)
    for seen, _ in ranks:
        assert np.allclose(seen, losses, rtol=0, atol=1e-9), f"{trial}: {seen} is not {losses}"
    whole = assemble([pieces for _, pieces in ranks])
    assert whole.keys() == parameters.keys(), f"{trial}: {whole.keys() ^ parameters.keys()}"
    compared = {name: values for name, values in parameters.items() if not name.endswith("num_batches_tracked")}
    off = [name for name, values in compared.items() if not np.allclose(whole[name], values, rtol=0, atol=1e-9)]
    assert not off, f"{trial}: {off}"


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest) -> list[list[Trained]]:
    return run_ranks(train, request.param, QUICK[request.param], STEPS, timeout_s=120)


@pytest.fixture(scope="module")
def more(request: pytest.FixtureRequest) -> list[list[Trained]]:
    return run_ranks(train, request.param, MORE[request.param], STEPS, timeout_s=300)


def _numbered(trials: Mapping[int, Sequence[Trial]]) -> list[Any]:
    """Return a case for each trial: its world, its number there, and the trial."""
    return [
        pytest.param(world, i, trial, id=f"{world}-{trial.model}-{trial.parallel}")
        for world, listed in trials.items()
        for i, trial in enumerate(listed)
    ]


@pytest.mark.parametrize(("quick", "i", "trial"), _numbered(QUICK), indirect=["quick"], scope="module")
def test_layouts_are_the_same_function(quick: list[list[Trained]], i: int, trial: Trial) -> None:
    _compare(trial, [rank[i] for rank in quick])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("more", "i", "trial"), _numbered(MORE), indirect=["more"], scope="module")
def test_more_layouts_are_the_same_function(more: list[list[Trained]], i: int, trial: Trial) -> None:
    _compare(trial, [rank[i] for rank in more])


def _start(rank: Rank | None, models: Sequence[tuple[str, str]]) -> list[dict[str, HeldTensor]]:
    """Build models by name, as a run does: in split layouts without memory, each rank making its own pieces."""
    found = []
    for model, layout in models:
        config = build(None, {"model.name": model, "strategy.parallel": layout}).config
        seed_everything(7)
        parts = build_parts(resolve(config), Work(INFO, TASK), make_world(config, rank), HostClock())
        found.append(held(parts))
        parts.sync.close()
    return found


def test_pieces_that_are_made_by_themselves_have_the_values_of_one_process() -> None:
    models = [("small_vit", "fsdp=2"), ("resnet20", "fsdp=2"), ("small_vit", "tp=2"), ("small_vit", "pp=2"),
              ("resnet20", "tp=2")]  # fmt: skip
    ranks = run_ranks(_start, 2, models)
    whole = _start(None, [(model, "dp=1") for model, _ in models])
    for i, which in enumerate(models):
        pieces, expected = assemble([rank[i] for rank in ranks]), assemble([whole[i]])
        assert pieces.keys() == expected.keys()
        assert all(np.array_equal(pieces[name], expected[name]) for name in expected), which


def _grown(rank: Rank, layout: str) -> tuple[int, int]:
    """Return by how many bytes the resident set grew at most while pieces were made, and the bytes of the pieces."""
    photos = replace(INFO, channels=3, image_size=224)
    settings = {"model.name": "timm/vit_small_patch16_224", "strategy.parallel": layout, "data.batch_size": 2}
    for model in ("timm/vit_small_patch16_224", "timm/vit_base_patch16_224"):
        config = build(None, {**settings, "model.name": model}).config
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _peak()
        parts = build_parts(resolve(config), Work(photos, TASK), make_world(config, rank), HostClock())
        grown = _peak() - before
        pieces = sum(each.nbytes for each in parts.local_model.parameters())
        parts.sync.close()
    return grown, pieces


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "layout", ["fsdp=2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp=2", "pp=2"))]
)
def test_no_rank_holds_the_whole_model_on_the_way(layout: str) -> None:
    """A model that is larger than a process's memory can start: pieces are made without the whole."""
    whole = 4 * 86_000_000
    for grown, pieces in run_ranks(_grown, 2, layout, timeout_s=200):
        assert 0.4 * whole < pieces < 0.65 * whole
        assert grown < 0.7 * whole


EVERY = {
    2: [
        *("dp=2", "dp=2,zero1", "fsdp=2", "tp=2", "tp=2,sequence"),
        *("pp=2", "pp=2,schedule=gpipe", "pp=2,schedule=interleaved", "pp=2,schedule=zero_bubble"),
    ],
    4: [
        *("dp=4", "dp=4,zero1", "fsdp=4", "tp=4", "pp=4"),
        *("dp=2,fsdp=2", "dp=2,tp=2", "dp=2,pp=2", "fsdp=2,tp=2", "fsdp=2,pp=2", "tp=2,pp=2"),
    ],
    8: [
        *("dp=8", "dp=8,zero1", "fsdp=8", "dp=4,fsdp=2", "dp=2,fsdp=4", "dp=4,pp=2", "dp=4,tp=2", "fsdp=4,tp=2"),
        *("dp=2,tp=2,pp=2", "dp=2,fsdp=2,tp=2", "fsdp=2,tp=2,pp=2", "dp=2,fsdp=2,pp=2"),
    ],
}


def _every(world: int, layout: str) -> list[Trial]:
    """Return each model in a layout, with and without what else a step may have; all have an uneven tail."""
    plain: Mapping[str, Any] = {}
    sizes = (16, 16, 13, 5) if world == 8 else (8, 8, 7, 3)  # a micro-batch has at least one sample
    trials = [
        Trial(model, layout, settings, sizes)
        for model in ("vit", "untied_gpt")
        for settings in (plain, {**CLIPPED, "training.ema": 0.9})
    ]
    if "sequence" not in layout and "schedule" not in layout:
        whole = f"{layout},microbatches=1" if "pp" in layout else layout  # micro-batches have statistics of their own
        trials.append(Trial("resnet", whole, BATCHNORM, sizes))
    return trials


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "layout"), [(world, layout) for world, all_ in EVERY.items() for layout in all_])
def test_every_layout_is_the_same_function(world: int, layout: str) -> None:
    check_same_function(_every(world, layout), world, timeout_s=500)
