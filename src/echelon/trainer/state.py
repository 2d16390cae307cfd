"""Everything that a run is, as one tree of tensors and plain values, and back."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.checkpoint import whole
from echelon.compression.rungs import Switch
from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.layout import Layout
from echelon.core.state_tree import StateView
from echelon.core.tuning import ALL
from echelon.data.base import DataInfo
from echelon.data.order import layer_seed
from echelon.optim.build import EMA
from echelon.optim.named_state import load_named_state, named_state, trained_names
from echelon.parallel.base import ORDER
from echelon.parallel.split import SplitModel
from echelon.sync.averaging.period import PeriodChange
from echelon.sync.base import Rescuable, Sync
from echelon.tasks.base import Task
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.sharded_state import to_own
from echelon.trainer.update import Update
from echelon.trainer.world import World

SINCE = "tuned_since"
"""The key of a state under which the epoch stands since which what is trained is as it is."""


@dataclass
class Cursor:
    """How far the run is: the next global batch is `batch` of `epoch`; `step` optimizer steps are done.

    Attributes:
        shares: samples of each rank's part of a full batch, in force; empty: they are equal.
        draws_by_part: what layers draw in a step depends on the seed, the step and the part of its batch alone, so
            that a part draws the same whoever has it; else on a rank's generator, which goes on from step to step.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    shares: tuple[int, ...] = ()
    draws_by_part: bool = False  # in checkpoints that say nothing of it


@dataclass(frozen=True)
class RunParts:
    """The objects whose state makes up a run. Where a model is split, `local_model` is what this rank has of it.

    Attributes:
        start_bytes: that this rank sent so that all replicas begin alike.
        frozen: names of parameters and statistics of the whole model that stay as they are.
        since: the epoch, counted from 0, since which this is so.
        switches: of an adaptive codec or a period, that the record has not been told of.
        update: the ranks' own; None: servers make it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None
    sync: Sync
    split: SplitModel | None = None
    start_bytes: int = 0
    frozen: Set[str] = frozenset()
    since: int = 0
    switches: list[Switch | PeriodChange] = field(default_factory=list)
    update: Update | None = None

    @property
    def local_model(self) -> nn.Module:
        """The parameters and buffers as plain tensors of this rank: the model itself unless it is split."""
        return self.split.pieces if self.split else self.model


@dataclass(frozen=True)
class OwnMarks:
    """What tells objects of a caller's own from others; empty: these have a name.

    Attributes:
        samples: a digest of training data.
        evaluation_samples: a digest of evaluation data.
        loss: the name of its code, and a digest of its source (`core.own.code_mark`).
    """

    samples: str = ""
    evaluation_samples: str = ""
    loss: str = ""


@dataclass(frozen=True)
class Fingerprint:
    """What must be the same for a checkpoint to continue a run: model, data, order of samples, optimizer.

    Attributes:
        optimizer_alone: its name in earlier versions' checkpoints of a single worker, which has the codec's momentum.
        samples, evaluation_samples, loss: of objects of a caller's own (`OwnMarks`).
        grown_from: training samples that a checkpoint may be of as well, of a run whose data grew.
    """

    task: str = ""
    model: str = ""
    optimizer: str = ""
    optimizer_alone: str = ""
    data: str = ""
    train_size: int = 0
    classes: int = 0
    batch_size: int = 0
    seed: int = 0
    sampling: str = ""
    tune: str = ALL
    grown_from: tuple[int, ...] = ()
    samples: str = ""
    evaluation_samples: str = ""
    loss: str = ""

    @classmethod
    def of(cls, run: ResolvedRun, info: DataInfo, task: Task, sampling: str, marks: OwnMarks) -> Fingerprint:
        """Return the fingerprint of a run; `sampling` is its loader's, `marks` of what is the caller's own."""
        config = run.config
        return cls(
            task=task.name,
            model=config.model.name,
            optimizer=run.described.optimizer.name,
            optimizer_alone=run.for_single_worker().config.optimizer.name,
            data=info.name,
            train_size=info.train_size,
            classes=len(info.classes),
            batch_size=config.data.batch_size,
            seed=config.training.seed,
            sampling=sampling,
            tune=config.model.tune,
            grown_from=tuple(stage.count for stage in info.stages),
            **asdict(marks),
        )

    def _also(self, key: str) -> Collection[object]:
        """Return what a checkpoint of this run may say as well."""
        return {"train_size": self.grown_from, "optimizer": (self.optimizer_alone,)}.get(key, ())

    def check(self, saved: StateView) -> None:
        """Refuse a checkpoint of another run.

        Args:
            saved: the fields of the checkpoint's fingerprint; what checkpoints of before did not know is not looked at.

        Raises:
            UserError: names the first thing that differs.
        """
        for key, value in asdict(self).items():
            if key in ("grown_from", "optimizer_alone") or saved.get(key) in self._also(key):
                continue
            if key == "train_size" and key in saved and saved[key] != value:
                raise UserError(
                    f"the run began with {saved[key]} training samples, and {self.data} has {value} now: put it "
                    "back as it was, or start a new run with --weights (what --rescan is for knows its samples)"
                )
            if key in ("samples", "evaluation_samples") and key in saved and saved[key] != value:
                which = "samples" if key == "samples" else "evaluation samples"
                differ = "targets, or some inputs, differ" if key == "samples" else "their number, or some, differ"
                raise UserError(
                    f"the {which} of {self.data} are not those that the run began with ({differ}): give these, or "
                    "start a new run with --weights"
                )
            if key == "loss" and key in saved and saved[key] != value:
                raise UserError(
                    f"the loss is not the one that the run began with: {value} in place of {saved[key]} (the digest is "
                    "of its source): give the same, or start a new run with --weights"
                )
            if key in saved and saved[key] != value:
                raise UserError(
                    f"the checkpoint is of another run: its {key} is {saved.get(key)!r}, here it is {value!r}; "
                    "resume with the same description, or start a new run with --weights"
                )


@contextmanager
def agreed_state(run_parts: RunParts, cursor: Cursor) -> Iterator[StateView]:
    """Give the state that all replicas share: what they agree on now, where parameters are each one's own.

    All ranks enter it together; the tensors hold these values inside the block only.
    """
    average = _agreed_averages(run_parts, run_parts.ema) if run_parts.ema else {}
    with run_parts.sync.agreed():
        state = shared_state(run_parts, cursor)
        if run_parts.ema:
            state = {**state, "ema": {**state["ema"], "average": average}}
        yield state


def _agreed_averages(run_parts: RunParts, ema: EMA) -> dict[str, Tensor]:
    """Return the moving averages that replicas agree on: buffers', and of replicas that differ all; others as they are,
    which may be more exact than what the model can hold.
    """
    with ema.swapped(run_parts.local_model), run_parts.sync.agreed(averages=True):
        agreed = {name: tensor.clone() for name, tensor in _differing(run_parts).items()}
    return {**ema.state_dict()["average"], **agreed}


def _differing(run_parts: RunParts) -> dict[str, Tensor]:
    """Return what moves and may differ between replicas: all where each trains by itself, else buffers."""
    tensors = moving(run_parts)
    if run_parts.sync.has_replica_state:
        return tensors
    buffers = {name for name, _ in run_parts.local_model.named_buffers(remove_duplicate=False)}
    return {name: tensor for name, tensor in tensors.items() if name in buffers}


def moving(run_parts: RunParts) -> dict[str, Tensor]:
    """Return the parameters and buffers of this rank, but for those that stay as they are."""
    return {name: t for name, t in run_parts.local_model.state_dict().items() if name not in run_parts.frozen}


def frozen_state(run_parts: RunParts) -> StateView:
    """Return what `shared_state` leaves out, for it stays as it is; in its place."""
    return {"model": {n: t for n, t in run_parts.local_model.state_dict().items() if n in run_parts.frozen}}


def shared_state(run_parts: RunParts, cursor: Cursor) -> StateView:
    """Return the state that is the same on every replica, but for what stays as it is."""
    return {
        "model": moving(run_parts),
        "optimizer": _optimizer_state(run_parts),
        "scaler": run_parts.scaler.state_dict(),
        "ema": run_parts.ema.state_dict() if run_parts.ema else {},
        "cursor": asdict(cursor),
    }


def _optimizer_state(run_parts: RunParts) -> StateView:
    if not _has_parameters(run_parts.optimizer):
        return {"state": {}, "param_groups": []}
    return named_state(run_parts.local_model, run_parts.optimizer)


def is_agreed(run_parts: RunParts) -> bool:
    """Whether `agreed_state` needs nothing from other replicas now; all ranks say the same."""
    known = run_parts.sync.steps_to_agreement() == 0
    return known and (run_parts.ema is None or run_parts.sync.steps_to_agreement(averages=True) == 0)


def with_agreed(run_parts: RunParts, state: StateView, replicas: Sequence[StateView]) -> StateView:
    """Return a state of `shared_state` with what the replicas agree on, told from what each saved of itself."""
    aliases = _aliases(run_parts.model)
    model = _overlaid(state["model"], run_parts.sync.agreed_of(replicas), aliases)
    if not run_parts.ema:
        return {**state, "model": model}
    average = _overlaid(state["ema"]["average"], run_parts.sync.agreed_of(replicas, averages=True), aliases)
    return {**state, "model": model, "ema": {**state["ema"], "average": average}}


def _overlaid(tensors: StateView, agreed: StateView, aliases: Mapping[str, str]) -> StateView:
    return {name: agreed.get(aliases.get(name, name), tensor) for name, tensor in tensors.items()}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor that has several, as tied weights do, by its other names."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _restore_host_generators(state: StateView) -> None:
    """Put back the generators of Python and numpy; checkpoints of earlier versions lack the second normal of a pair."""
    python, numpy = state.get("python_normal", []), state.get("numpy_normal", [])
    random.setstate((3, tuple(state["python"]), python[0] if python else None))
    keys, position = state["numpy"].numpy().astype(np.uint32), state["numpy_position"]
    np.random.set_state(("MT19937", keys, position, len(numpy), numpy[0] if numpy else 0.0))


def rank_state(run_parts: RunParts, world: World) -> StateView:
    """Return the state of this rank alone: random generators, buffers (BatchNorm), what `sync` keeps.

    Parameters, optimizer and scaler too, where they are each replica's own. Tensors are those that training goes on
    with: they are to be copied before it does, and before the model holds what the replicas agree on.
    """
    _, keys, position, has_normal, normal = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    _, python, python_normal = random.getstate()
    state: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "python": list(python),
        "python_normal": [] if python_normal is None else [python_normal],  # the second one of a pair, not drawn yet
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_position": int(position),
        "numpy_normal": [float(normal)] if has_normal else [],
        "sync": run_parts.sync.state_dict(),
        "buffers": {n: b for n, b in run_parts.local_model.named_buffers() if n not in run_parts.frozen},
    }
    if run_parts.sync.has_replica_state:
        state["model"] = moving(run_parts)
        state["optimizer"] = run_parts.optimizer.state_dict()
        state["scaler"] = run_parts.scaler.state_dict()
    if run_parts.ema:
        kept = None if run_parts.sync.has_replica_state else {name for name, _ in run_parts.local_model.named_buffers()}
        average = run_parts.ema.state_dict()["average"]
        state["ema"] = {name: tensor for name, tensor in average.items() if kept is None or name in kept}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


_GO_TOGETHER = ("momentum", "nesterov", "weight_decay")
_OF_DEVICE = ("fused",)
COMMON = "common"
"""In place of a rank's `sync`: what all replicas have alike of it, where one of its replica's ranks died."""


def load_shared_state(run_parts: RunParts, state: StateView) -> Cursor:
    """Restore what every replica has; returns the cursor. Where something else was trained, the optimizer begins anew.

    Raises:
        UserError: the checkpoint is of another model.
    """
    state = to_own(state, run_parts.split.pieces) if run_parts.split else whole(state)
    try:
        run_parts.local_model.load_state_dict(state["model"])
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip() if len(str(error).splitlines()) > 1 else str(error)
        raise UserError(f"the checkpoint is of another model: {reason}") from None
    if is_same_tuning(run_parts, state):
        _load_optimizer(run_parts, state)
    run_parts.local_model.load_state_dict(state["model"])  # that state was made by a step, which some move at lr=0
    if state["scaler"]:
        run_parts.scaler.load_state_dict(dict(state["scaler"]))
    if run_parts.ema and state["ema"]:
        run_parts.ema.load_state_dict({**state["ema"], "average": {**state["model"], **state["ema"]["average"]}})
    return Cursor(**state["cursor"])


def is_same_tuning(run_parts: RunParts, state: StateView) -> bool:
    """Whether what is trained was the same when a state was saved."""
    return bool(state.get(SINCE, 0) == run_parts.since)


def _has_parameters(optimizer: torch.optim.Optimizer) -> bool:
    return any(group["params"] for group in optimizer.param_groups)


def _load_optimizer(run_parts: RunParts, state: StateView) -> None:
    if not _has_parameters(run_parts.optimizer):  # of a stage of a pipeline where nothing is trained
        return
    _check_trained(run_parts, state["optimizer"]["param_groups"])
    # Alone the optimizer applies momentum; with others, before encoding, a codec may, and the decay goes with it.
    described = [{k: g[k] for k in (*_GO_TOGETHER, *_OF_DEVICE) if k in g} for g in run_parts.optimizer.param_groups]
    if state["optimizer"]["state"]:
        groups = _own_groups(run_parts, state["optimizer"]["param_groups"])
        known = {**state["optimizer"], "param_groups": groups}
        load_named_state(run_parts.local_model, run_parts.optimizer, known)
    else:
        _load_groups(run_parts, state["optimizer"]["param_groups"])
    for group, values in zip(run_parts.optimizer.param_groups, described, strict=True):
        group.update(values)


def _check_trained(run_parts: RunParts, groups: Sequence[StateView]) -> None:
    """Refuse a checkpoint of an optimizer that did not train all of what is trained now (UserError)."""
    saved = {name for group in groups for name in group["params"]}
    new = [name for name in trained_names(run_parts.local_model, run_parts.optimizer) if name not in saved]
    if new:
        raise UserError(
            f"the checkpoint is of a run that did not train {new[0]}, which --tune trains now: start a new run with "
            "--weights"
        )


def _load_groups(run_parts: RunParts, groups: Sequence[StateView]) -> None:
    """Give the groups of an optimizer that remembers nothing their settings: torch takes such groups as they come, and
    those of a split model come joined by their settings.
    """
    names = {id(parameter): name for name, parameter in run_parts.local_model.named_parameters()}
    saved = {name: group for group in groups for name in group["params"]}
    for group in run_parts.optimizer.param_groups:
        known = next((saved[name] for p in group["params"] if (name := names.get(id(p), "")) in saved), {})
        group.update({key: value for key, value in known.items() if key != "params"})


def _own_groups(run_parts: RunParts, groups: Sequence[StateView]) -> Sequence[StateView]:
    """Return a saved group for each of the optimizer's: those of the same settings were saved as one."""
    optimizer = run_parts.optimizer
    if len(groups) >= len(optimizer.param_groups):
        return groups
    names = {id(parameter): name for name, parameter in run_parts.local_model.named_parameters()}
    saved = {name: group for group in groups for name in group["params"]}
    listed = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
    known = [next((saved[name] for name in each if name in saved), None) for each in listed]
    if None in known:
        return groups
    return [{**group, "params": each} for group, each in zip(known, listed, strict=True) if group is not None]


def averaged(state: StateView) -> StateView:
    """Return the weights that a checkpoint's state is judged by: their moving average, where there is one, in the types
    that the model has.
    """
    weights = state["model"]
    average = state["ema"]["average"] if state["ema"] else {}
    return {**weights, **{name: tensor.to(weights[name].dtype) for name, tensor in average.items()}}


def layout_of(world: World) -> dict[str, int]:
    """Return the ranks along each axis: what a rank's own state fits to."""
    if world.placement is None:
        return {Axis.DP.value: world.size} if world.size > 1 else {}
    return layout_sizes(world.placement.layout)


def layout_sizes(layout: Layout) -> dict[str, int]:
    """Return the ranks along each axis that has several, the outermost first."""
    return {axis.value: layout.size(axis) for axis in ORDER if layout.size(axis) > 1}


def saved_layout(state: StateView) -> dict[str, int]:
    """Return the layout that a checkpoint was written in; those before there were layouts had replicas alone."""
    layout: Mapping[str, int] = state.get("layout", {Axis.DP.value: state["world_size"]})
    return {axis: size for axis, size in layout.items() if size > 1}


def load_rank_state(
    run_parts: RunParts,
    world: World,
    saved: Mapping[str, int],
    ranks: Mapping[int, StateView],
    same_tuning: bool = True,
) -> bool:
    """Restore this rank's own state; in another layout, or where something else was trained, only what can be kept.

    Random generators start anew from the shared state then, and the strategy merges what the ranks with the same piece
    had; where pieces are others, it begins anew from the parameters.

    Args:
        saved: the layout that was saved.

    Returns:
        Whether random generators go on from where this rank's were.

    Raises:
        UserError: the strategy cannot begin anew.
    """
    if not same_tuning and isinstance(run_parts.sync, Anchored):
        run_parts.sync.begin_anew()
    if saved != layout_of(world) and not same_tuning:
        return False
    if saved != layout_of(world):
        _load_resharded_ranks(run_parts, world, saved, ranks)
        return False
    state = ranks.get(world.rank)
    if same_tuning and _has_other_pieces(run_parts, world, state):
        _begin_with_other_pieces(run_parts, saved, ranks)
        return False
    if not state:  # it died, and others saved all but what it alone had
        return False
    if COMMON in state and same_tuning:
        assert isinstance(run_parts.sync, Rescuable)
        run_parts.sync.load_common_state(state[COMMON])
    if "torch" not in state:
        return False
    torch.set_rng_state(state["torch"])
    _restore_host_generators(state)
    if world.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)
    with torch.no_grad():
        for name, buffer in run_parts.local_model.named_buffers():
            stayed = name in run_parts.frozen or (not same_tuning and name not in state["buffers"])  # it is in the base
            if not stayed:
                buffer.copy_(state["buffers"][name])
    if "model" in state and same_tuning:
        run_parts.local_model.load_state_dict({**run_parts.local_model.state_dict(), **state["model"]})
        run_parts.optimizer.load_state_dict(state["optimizer"])
        run_parts.scaler.load_state_dict(dict(state["scaler"]))
    if run_parts.ema and "ema" in state:
        ema = run_parts.ema.state_dict()
        run_parts.ema.load_state_dict(ema | {"average": ema["average"] | state["ema"]})
    if same_tuning and "sync" in state:
        run_parts.sync.load_state_dict(state["sync"])
    return True


def _load_resharded_ranks(
    run_parts: RunParts, world: World, saved: Mapping[str, int], ranks: Mapping[int, StateView]
) -> None:
    now = layout_of(world)
    inner = [axis.value for axis in ORDER if axis is not Axis.DP]
    if all(saved.get(axis, 1) == now.get(axis, 1) for axis in inner):
        size = math.prod(saved.get(axis, 1) for axis in inner)  # ranks of a replica; dp is the outermost axis
        same_piece = [rank for rank in sorted(ranks) if rank % size == world.rank % size]
        run_parts.sync.load_resharded([ranks[rank]["sync"] for rank in same_piece if "sync" in ranks[rank]])
        moments = [ranks[rank]["optimizer"] for rank in same_piece if "model" in ranks[rank]]
        if moments:
            run_parts.optimizer.load_state_dict(mean_of(moments))
        return
    _begin_with_other_pieces(run_parts, saved, ranks)


def _has_other_pieces(run_parts: RunParts, world: World, state: StateView | None) -> bool:
    """Whether a rank has other pieces than it saved, in a layout of the same sizes: cut elsewhere, or by another plan.

    All ranks call it together, where the model is split.
    """
    if run_parts.split is None or world.group is None or run_parts.split.pieces.divided is not None:
        return False
    own = {name: tuple(buffer.shape) for name, buffer in run_parts.local_model.named_buffers()}
    saved = {name: tuple(buffer.shape) for name, buffer in (state or {}).get("buffers", {}).items()}
    differs = any(name in own and own[name] != shape for name, shape in saved.items())
    differs = differs or (bool(saved) and not own.keys() - run_parts.frozen <= saved.keys())
    flag = torch.tensor([differs], dtype=torch.uint8, device=world.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=world.group)
    return bool(flag)


def _begin_with_other_pieces(run_parts: RunParts, saved: Mapping[str, int], ranks: Mapping[int, StateView]) -> None:
    """Let the strategy begin anew, for what it kept is of other pieces.

    Raises:
        UserError: it cannot.
    """
    if any(_left_out_something(rank.get("sync", {})) for rank in ranks.values()):
        warnings.warn(
            "what the codec had left out was kept for the pieces of another layout, and is forgotten", stacklevel=2
        )
    if isinstance(run_parts.sync, Restartable):
        run_parts.sync.restart()
    elif run_parts.sync.has_replica_state:
        raise UserError(
            f"the checkpoint was written by split replicas ({saved}) whose strategy kept what it agreed on in pieces: "
            "resume with the same sizes of pp, fsdp and tp, or start a new run with --weights"
        )


def mean_of(states: Sequence[Any]) -> Any:
    """Return the mean of states of one form, such as each saved rank's optimizer: of tensors of floats element by
    element, of all else the first one's.

    Replicas that had moments of their own (local SGD, DiLoCo, EASGD) go on from their mean, as from the mean of their
    parameters. What some have not (they had not stepped that parameter yet) is the mean of the others'.

    >>> mean_of([{"state": {0: {"exp_avg": torch.tensor([1.0])}}}, {"state": {0: {"exp_avg": torch.tensor([3.0])}}}])
    {'state': {0: {'exp_avg': tensor([2.])}}}
    """
    first = states[0]
    if isinstance(first, dict) and all(isinstance(s, dict) for s in states):
        keys = dict.fromkeys(key for state in states for key in state)  # as they come, each once
        return {key: mean_of([state[key] for state in states if key in state]) for key in keys}
    if isinstance(first, Tensor) and _has_mean(first) and all(_alike(first, s) for s in states):
        wide = torch.complex128 if first.is_complex() else torch.float64
        return torch.stack([s.to(first.device, wide) for s in states]).mean(0).to(first.dtype)
    return first


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _alike(first: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and other.shape == first.shape and other.dtype == first.dtype


def _left_out_something(sync: StateView) -> bool:
    states = [sync, sync.get("first") or {}, *(fragment["codec"] for fragment in sync.get("fragments", ()))]
    return any(str(key).startswith("sent.") for state in states for key in state)


@runtime_checkable
class Anchored(Protocol):
    """A strategy that keeps what replicas agreed on, and can begin anew from the present parameters."""

    def begin_anew(self) -> None:
        """Forget what was kept; no step has been made yet."""


@runtime_checkable
class Restartable(Protocol):
    """A strategy that can begin anew from the present parameters."""

    def restart(self) -> None:
        """Forget what was kept between steps."""


def seed_layers(seed: int, step: int, world: World) -> None:
    """Seed what layers of this rank draw (dropout, drop path) in a step, by its part of the batch."""
    drawn = layer_seed(seed, step, world.data_rank)
    torch.default_generator.manual_seed(drawn)
    if world.device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(drawn)


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and Python alike on every rank: replicas start from the same parameters."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
