"""What a codec left out, and momentum, between several workers and one alone: nothing is lost, nothing counts twice."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from echelon.checkpoint import gather_rank_state
from echelon.collectives import registry as paths
from echelon.core.errors import UserError
from echelon.optim.named_state import trained_names
from echelon.trainer.state import (
    Cursor,
    load_rank_state,
    load_shared_state,
    rank_state,
    shared_state,
    with_agreed,
)
from tests.laws.test_sync import save_in_middle
from tests.ranks.replicas import (
    FEATURES,
    ChannelsLast,
    Quadratic,
    Trial,
    copy,
    make_parts,
    save,
    targets,
    train,
    world_of,
)
from tests.ranks.spawn import Rank, run_ranks

WAY = ("sent.error", "relay.error")
ALL = "topk(1.0, momentum=0.9, values=fp32)"


def _alone(
    rank: Rank, trial: Trial, shared: object, own: dict[int, object], last: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[float, float]]:
    """Go on alone up to a step: parameters then, the optimizer's velocities before, its momentum and decay."""
    parts = make_parts(trial)
    load_shared_state(parts, shared)
    load_rank_state(parts, world_of(rank), {"dp": len(own)} if len(own) > 1 else {}, own)
    named = dict(parts.model.named_parameters())
    kept = {n: parts.optimizer.state[p] for n, p in named.items() if p in parts.optimizer.state}
    velocity = {n: state["momentum_buffer"].clone() for n, state in kept.items() if "momentum_buffer" in state}
    train(parts, rank, 6, last)
    with parts.sync.agreed():
        after = copy(parts.model.state_dict())
    parts.sync.close()
    (group,) = parts.optimizer.param_groups
    return {n: after[n] for n in named}, velocity, (group["momentum"], group["weight_decay"])


def _sums(own: dict[int, dict[str, dict[str, object]]], *kinds: str) -> dict[str, Tensor]:
    """Return the sum over ranks of memories of `first.weight`, as they were saved."""
    found = torch.zeros(32 * FEATURES, dtype=torch.float64)
    for rank in own.values():
        sync = rank["sync"]
        codecs = [fragment["codec"] for fragment in sync.get("fragments", ())]
        for key, tensor in (item for memories in (sync, *codecs) for item in memories.items()):
            kind, _, rest = key.partition("/")
            name, _, start = rest.rpartition("/")
            if kind in kinds and name == "first.weight":
                found[int(start) : int(start) + tensor.numel()] += tensor
    return found.view(32, FEATURES)


@pytest.mark.parametrize("sync", ["allreduce", "local(6)"])
def test_alone_nothing_that_a_codec_left_out_is_lost(sync: str) -> None:
    trial, last = Trial(sync, "topk(0.1)"), 12 if sync == "local(6)" else 7
    ranks = run_ranks(save_in_middle, 2, [trial])
    own = {r: ranks[r][0][1] for r in range(2)}
    forgetful = {r: _without_errors(one) for r, one in own.items()}
    ends = [run_ranks(_alone, 1, trial, ranks[0][0][0], one, last)[0][0]["first.weight"] for one in (own, forgetful)]
    waiting = _sums(own, "sent.error", "relay.error")
    assert bool(waiting.any())
    moved = waiting if sync == "local(6)" else -trial.lr * waiting
    assert torch.allclose(ends[0], ends[1] + moved, rtol=0, atol=1e-12)


def _without_errors(own: dict[str, object]) -> dict[str, object]:
    sync = own["sync"]
    assert isinstance(sync, dict)
    if "fragments" not in sync:
        return own | {"sync": {}}
    return own | {"sync": sync | {"fragments": [fragment | {"codec": {}} for fragment in sync["fragments"]]}}


def _velocities(rank: Rank, shared: object, own: dict[int, object]) -> tuple[Tensor, float]:
    """Return this rank's velocity of `first.weight` when two ranks go on from one, and the optimizer's momentum."""
    parts = make_parts(Trial("allreduce", "topk(0.1, momentum=0.9)"))
    parts.optimizer.param_groups[0]["momentum"] = 0.0
    load_shared_state(parts, shared)
    load_rank_state(parts, world_of(rank), {}, own)
    saved = rank_state(parts, world_of(rank))
    own_part = _sums({0: saved}, "sent.velocity").clone()
    parts.sync.close()
    return own_part, float(parts.optimizer.param_groups[0]["momentum"])


def test_momentum_moves_between_the_optimizer_and_a_codec() -> None:
    """Alone there is no codec to apply it; with others the optimizer must not apply it again."""
    strong, weak = (functools.partial(torch.optim.SGD, weight_decay=decay) for decay in (0.1, 0.01))
    inside = Trial("allreduce", "topk(0.1, momentum=0.9)", optimizer=strong)
    alone = Trial("allreduce", momentum=0.9, optimizer=weak)
    ranks = run_ranks(save_in_middle, 2, [inside])
    own = {r: ranks[r][0][1] for r in range(2)}
    ((_, velocity, left),) = run_ranks(_alone, 1, alone, ranks[0][0][0], own, 7)
    assert left == (0.9, 0.01)
    assert torch.allclose(velocity["first.weight"], _sums(own, "sent.velocity"), rtol=0, atol=1e-12)
    assert bool(velocity["first.weight"].any())

    ((state, saved),) = run_ranks(save_in_middle, 1, [alone])[0]
    seen = run_ranks(_velocities, 2, state, {0: saved})
    kept = state["optimizer"]["state"]["first.weight"]["momentum_buffer"]
    assert [momentum for _, momentum in seen] == [0.0, 0.0]
    assert torch.allclose(seen[0][0] + seen[1][0], kept, rtol=0, atol=1e-12)


def _whole(rank: Rank, trial: Trial, last: int) -> dict[str, Tensor]:
    """Train up to a step without a pause: the parameters then."""
    parts = make_parts(trial)
    train(parts, rank, 0, last)
    after = copy(parts.model.state_dict())
    parts.sync.close()
    return after


@pytest.mark.parametrize("model", [Quadratic, ChannelsLast])
@pytest.mark.parametrize("growth", [0, 4], ids=["", "losses scaled"])
@pytest.mark.parametrize("before", [2, 1], ids=["", "of a survivor"])
def test_momentum_in_a_codec_survives_going_on_alone(
    before: int, growth: int, model: type[Quadratic | ChannelsLast]
) -> None:
    """Where all is sent in each step the codec's momentum is SGD's: two workers, then one, train as one throughout."""
    plain = Trial("allreduce", momentum=0.9, model=model, growth=growth)
    whole = run_ranks(_whole, 1, plain, 12)[0]
    ranks = run_ranks(save_in_middle, before, [replace(plain, momentum=0.0, compression=ALL, survives=before == 1)])
    own = {r: ranks[r][0][1] for r in range(before)}
    ends = run_ranks(_alone, 1, plain, ranks[0][0][0], own, 12)[0][0]
    assert {name: float((ends[name] - whole[name]).abs().max()) for name in ends} == dict.fromkeys(
        whole, pytest.approx(0, abs=1e-5)
    )


def _back_again(rank: Rank, trial: Trial, steps: tuple[int, int], shared: object, own: dict[int, object]) -> object:
    """Go on from another number of ranks, and save; returns what is saved, by rank."""
    parts = make_parts(trial)
    load_shared_state(parts, shared)
    load_rank_state(parts, world_of(rank), {"dp": len(own)} if len(own) > 1 else {}, own)
    train(parts, rank, *steps)
    saved = save(parts, rank, steps[1])
    dist.barrier()  # nothing was sent until here: one rank may be done before the other has connected
    parts.sync.close()
    return saved


@pytest.mark.parametrize("compression", ["sign", "topk(0.1)", "powersgd(rank=1)", "int8"])
@pytest.mark.parametrize("sync", ["local(6)", "local(6, overlap=2)", "allreduce"])
def test_two_workers_one_and_two_again(sync: str, compression: str) -> None:
    """The one saves before it has agreed with anyone: what waits for the next average waits on."""
    trial = Trial(sync, compression)
    ranks = run_ranks(save_in_middle, 2, [trial])
    alone = run_ranks(_back_again, 1, trial, (6, 6), ranks[0][0][0], {r: ranks[r][0][1] for r in range(2)})[0]
    again = run_ranks(_back_again, 2, trial, (6, 6), alone[0], {0: alone[1]})
    before = _sums({r: ranks[r][0][1] for r in range(2)}, "sent.error", "relay.error")
    after = _sums({r: again[r][1] for r in range(2)}, "sent.error", "relay.error")
    assert torch.allclose(before, after, rtol=0, atol=1e-6)
    assert bool(before.any()) == (compression != "int8")


def _saved_after(rank: Rank, trials: list[Trial], steps: int) -> list[tuple[object, object]]:
    """Return what is saved after so many steps, of each trial."""
    saved = []
    for trial in trials:
        parts = make_parts(trial)
        train(parts, rank, 0, steps)
        saved.append(save(parts, rank, steps))
        parts.sync.close()
    return saved


def _learning_nothing(
    rank: Rank, trials: list[Trial], steps: int, shared: list[object], owns: list[dict[int, dict[str, object]]]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Go on at rate 0: the first weight, its mean over the replicas after five steps, and what codecs wait to add."""
    seen = []
    for trial, state, own in zip(trials, shared, owns, strict=True):
        parts = make_parts(trial)
        load_shared_state(parts, state)
        load_rank_state(parts, world_of(rank), {"dp": len(own)}, own)
        parts.optimizer.param_groups[0]["lr"] = 0.0
        begun = parts.model.state_dict()["first.weight"].clone()
        train(parts, rank, steps, steps + 5)
        state, waits = parts.sync.state_dict(), _sums({0: rank_state(parts, world_of(rank))}, *WAY)
        if any(fragment["with_unsent"] for fragment in state["fragments"]):
            waits.zero_()
        both = torch.stack([parts.model.state_dict()["first.weight"], waits])
        dist.all_reduce(both)
        seen.append((begun, both[0] / rank.world_size, both[1]))
        parts.sync.close()
    return seen


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("steps", [6, 10])
def test_another_world_learns_nothing_twice_of_what_stayed_in_replicas(steps: int, after: int) -> None:
    """Saved where no mean was just applied, the model has it; with overlap a mean is on its way."""
    syncs = ["local(4)", "local(4, overlap=3)", "diloco(4, fragments=2, outer_lr=1, outer_momentum=0)"]
    codecs = ["sign(warmup_steps=0)", "topk(0.1, warmup_steps=0)", "powersgd(rank=1)"]
    trials = [Trial(sync, codec, lr=0.02) for codec in codecs for sync in syncs]
    first_on_its_way = Trial(syncs[1], codecs[-1], lr=0.02)  # later the codec had something left before it, too
    trials = [trial for trial in trials if trial != first_on_its_way or steps == 6]
    ranks = run_ranks(_saved_after, 2, trials, steps)
    owns = [{r: ranks[r][i][1] for r in range(2)} for i in range(len(trials))]
    found = run_ranks(_learning_nothing, after, trials, steps, [state for state, _ in ranks[0]], owns)[0]
    for trial, own, (begun, ended, waits) in zip(trials, owns, found, strict=True):
        waited = _sums(own, *WAY)
        assert bool(waited.any()), trial
        lacked = waited if trial.compression == codecs[-1] and trial != first_on_its_way else torch.zeros_like(waited)
        assert torch.allclose(ended + waits, begun + lacked, rtol=0, atol=1e-6), trial


@pytest.mark.parametrize("after", [1, 3])
def test_another_world_takes_an_outer_step_once(after: int) -> None:
    """Where a mean has just left, the model that is saved has gone all the way already."""
    trials = [Trial("local(4, overlap=3, outer_lr=2)", lr=0.02)]
    ranks = run_ranks(_saved_after, 2, trials, 8)
    own = {r: ranks[r][0][1] for r in range(2)}
    ((begun, ended, _),) = run_ranks(_learning_nothing, after, trials, 8, [ranks[0][0][0]], [own])[0]
    assert torch.allclose(ended, begun, rtol=0, atol=1e-12)


def _regrouped_at_once(
    rank: Rank, trial: Trial, steps: int, shared: object, own: dict[int, object]
) -> list[dict[str, Tensor]]:
    """Go on from another number of ranks: the model, also in a group that is built then, and of who joins that."""
    parts, joins = make_parts(trial), make_parts(trial)
    load_shared_state(parts, shared)
    load_rank_state(parts, world_of(rank), {"dp": len(own)}, own)
    seen = [copy(parts.model.state_dict())]
    build = parts.sync.leave()
    made = build(dist.group.WORLD, paths.build("backend"))
    seen.append(copy(parts.model.state_dict()))
    joins.model.load_state_dict(parts.model.state_dict())
    joins.sync.take_shared_memory(made.shared_memory())
    seen.append(copy(joins.model.state_dict()))
    dist.barrier()
    made.close()
    joins.sync.close()
    return seen


def test_what_another_world_begins_with_survives_another_group() -> None:
    trial, steps = Trial("local(4)", "topk(0.1, warmup_steps=0)"), 6
    ranks = run_ranks(_saved_after, 2, [trial], steps)
    own = {r: ranks[r][0][1] for r in range(2)}
    for begun, *others in run_ranks(_regrouped_at_once, 3, trial, steps, ranks[0][0][0], own):
        assert all(torch.equal(other[name], begun[name]) for other in others for name in begun)


def _uneven(rank: Rank, sizes: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Agree once, of parts of such sizes, and learn nothing after it: the mean of the replicas, what is shown of them,
    and what is told from what they save.
    """
    parts = make_parts(Trial("local(4)", "topk(0.1, warmup_steps=0)", model=Quadratic))
    for step in range(5):
        parts.optimizer.param_groups[0]["lr"] = 0.05 * (step < 4)
        x = torch.randn(sizes[rank.index], FEATURES, dtype=torch.float64)
        divisor = parts.sync.begin_step(len(x), sum(sizes))
        with parts.sync.micro_batch(last=True):
            (parts.sync.module(x) / divisor).backward()
        parts.sync.step()
    saved = gather_rank_state(rank_state(parts, world_of(rank)))
    told = with_agreed(parts, shared_state(parts, Cursor()), list(saved.values()))["model"] if saved else {}
    mean = parts.model.state_dict()["a"].clone()
    dist.all_reduce(mean)
    with parts.sync.agreed():
        shown = parts.model.state_dict()["a"].clone()
    parts.sync.close()
    return mean / rank.world_size, shown, told.get("a", shown)


@pytest.mark.parametrize("sizes", [(6, 2), (8, 0)], ids=str)
def test_what_stays_in_replicas_weighs_the_same_of_all(sizes: tuple[int, int]) -> None:
    """As it does in the next agreement, whatever the replicas' shares of a batch."""
    for mean, *agreed in run_ranks(_uneven, 2, sizes):
        for each in agreed:
            assert torch.allclose(each, mean, rtol=0, atol=1e-12)


def _states(rank: Rank, trial: Trial, last: int) -> list[dict[str, Tensor]]:
    parts = make_parts(trial)
    begun = copy(parts.model.state_dict())
    seen = [begun, *train(parts, rank, 0, last)]
    parts.sync.close()
    return seen


@pytest.mark.parametrize("model", [Quadratic, ChannelsLast])
def test_what_was_left_out_of_synchronous_steps_joins_their_last_one(model: type[Quadratic | ChannelsLast]) -> None:
    """With SGD all that parameters have moved by is the learning rate times all gradients: w - mean(targets)."""
    trial, start = Trial("local(3, start=4)", "topk(0.1)", model=model), 4
    seen = run_ranks(_states, 2, trial, start)[0]
    wanted = [model.optimum(torch.from_numpy(targets(step))) for step in range(start)]
    gradients = sum(seen[step]["a"] - wanted[step] for step in range(start))
    assert torch.allclose(seen[0]["a"] - trial.lr * gradients, seen[start]["a"], rtol=0, atol=1e-6)


def _without_last(rank: Rank, trial: Trial, start: int) -> list[dict[str, Tensor]]:
    """Return the parameters before each synchronous step, and after the last one, which is left out."""
    parts = make_parts(trial)
    seen = [copy(parts.model.state_dict()), *train(parts, rank, 0, start - 1)]
    x = torch.from_numpy(targets(start - 1))
    parts.sync.begin_step(len(x), len(x))
    with parts.sync.micro_batch(last=True):
        loss = parts.sync.module(x)
        with parts.sync.silent():
            parts.scaler.scale(loss * torch.nan).backward()
    parts.sync.leave_out()
    seen.append(copy(parts.model.state_dict()))
    parts.sync.close()
    return seen


@pytest.mark.parametrize("compression", ["topk(0.1)", "none"])
def test_what_was_left_out_arrives_where_the_last_synchronous_step_is_left_out(compression: str) -> None:
    trial, start = Trial("local(3, start=4)", compression, model=Quadratic), 4
    first, second = run_ranks(_without_last, 2, trial, start)
    gradients = sum(first[step]["a"] - Quadratic.optimum(torch.from_numpy(targets(step))) for step in range(start - 1))
    assert torch.allclose(first[0]["a"] - trial.lr * gradients, first[start]["a"], rtol=0, atol=1e-6)
    assert all(torch.equal(first[start][name], second[start][name]) for name in first[start])


@pytest.mark.parametrize(
    "compression", ["sign", "topk(0.1, momentum=0.9)", "threshold(density=0.1)", "powersgd(rank=1)"]
)
def test_a_growing_loss_scale_changes_nothing(compression: str) -> None:
    trial = Trial("allreduce", compression, model=Quadratic)
    plain = run_ranks(_states, 2, trial, 8)[0]
    scaled = run_ranks(_states, 2, replace(trial, growth=2), 8)[0]
    assert all(torch.allclose(s[n], p[n], rtol=0, atol=1e-5) for s, p in zip(scaled, plain, strict=True) for n in p)


def _agreed(rank: Rank, trial: Trial, last: int) -> dict[str, Tensor]:
    parts = make_parts(trial)
    train(parts, rank, 0, last)
    with parts.sync.agreed():
        seen = copy(parts.model.state_dict())
    parts.sync.close()
    return seen


def test_replicas_that_keep_a_share_of_their_own_are_averaged_to_be_shown() -> None:
    one, other = run_ranks(_agreed, 2, Trial("diloco(2, alpha=0.5)", model=Quadratic), 4)
    assert all(torch.equal(one[name], other[name]) for name in one)


def _refusal(rank: Rank) -> str:
    """Say why a rank alone does not load a state whose optimizer did not train all that is trained now."""
    parts = make_parts(Trial("allreduce"))
    train(parts, rank, 0, 1)
    shared, _ = save(parts, rank, 1)
    load_shared_state(parts, shared)
    for group in shared["optimizer"]["param_groups"]:
        group["params"].remove("first.weight")
    try:
        load_shared_state(parts, shared)
    except UserError as error:
        return str(error)
    finally:
        parts.sync.close()
    return ""


def test_a_state_of_a_run_that_trained_less_is_refused() -> None:
    assert "did not train first.weight, which --tune trains now" in run_ranks(_refusal, 1)[0]


def test_names_that_torch_wraps_are_the_same_ones_in_a_state() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saved = get_optimizer_state_dict(model, optimizer)["param_groups"][0]["params"]
    assert trained_names(model, optimizer) == saved != [name for name, _ in model.named_parameters()]


class Matrices(nn.Module):
    """Three matrices that travel encoded, in one bucket: another owner has parts of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(3)))
        self.layers.append(nn.Linear(FEATURES, 640, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().sum() / 2
        return loss


def _regrouped(rank: Rank, trial: Trial, after: list[int]) -> tuple[Tensor, Tensor | None]:
    """Return what waits in this rank's codec when its group is left, and in that of another group."""
    parts, sync_path = make_parts(trial), paths.build("backend")
    group = dist.new_group(after)
    train(parts, rank, 0, 4)
    waited = _waiting(parts.sync.state_dict())
    build = parts.sync.leave()
    dist.barrier()
    if rank.index not in after:
        return waited, None
    made = build(group, sync_path)
    waits = _waiting(made.state_dict())
    made.close()
    return waited, waits


def _waiting(state: dict[str, object]) -> Tensor:
    """Return the sum of what waits in a rank's codec, both ways."""
    flat = state | dict(*(f["codec"] for f in state.get("fragments", ())))  # type: ignore[union-attr]
    return sum((t.sum() for k, t in flat.items() if ".error/" in k), torch.zeros((), dtype=torch.float64))  # type: ignore[misc,union-attr]


@pytest.mark.parametrize("after", [[0, 1], [1, 2], [2, 0, 1]], ids=str)
@pytest.mark.parametrize("sync", ["allreduce", "local(2)"])
def test_owners_among_others_take_over_what_waits(sync: str, after: list[int]) -> None:
    """Also of parameters that they owned nothing of before."""
    trial = Trial(sync, "topk(0.03, momentum=0, warmup_steps=0)", model=Matrices)
    found = run_ranks(_regrouped, 3, trial, after)
    for rank, (waited, waits) in enumerate(found):
        assert (waits is None) == (rank not in after)
        assert waits is None or torch.allclose(waits, waited, rtol=1e-9, atol=1e-12)


FACTORS = (2.0, 1.0, 0.5)


def _behind(rank: Rank) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what waits before a step's sums, after them, and in another group, where others have made the update, and
    have scaled the losses otherwise by each of some factors.
    """
    seen = []
    for factor in FACTORS:
        parts = make_parts(Trial("allreduce", "topk(0.03, warmup_steps=0)", model=Matrices, growth=100))
        train(parts, rank, 0, 4)
        before = _waiting(parts.sync.state_dict())
        parts.sync.begin_step(1, 1)
        with parts.sync.micro_batch(last=True):
            parts.scaler.scale(parts.sync.module(torch.from_numpy(targets(4)))).backward()
        after, scaler = _waiting(parts.sync.state_dict()), parts.scaler.state_dict()
        build = parts.sync.leave()
        parts.scaler.load_state_dict({**scaler, "scale": scaler["scale"] * factor})
        parts.sync.settle_step(made=True)
        made = build(dist.group.WORLD, paths.build("backend"))
        seen.append((before, after, _waiting(made.state_dict())))
        made.close()
    return seen


def test_who_lacks_an_update_remembers_gradients_as_they_are_scaled_since() -> None:
    """Where it was left out, for its gradients had overflowed, they are forgotten."""
    for seen in run_ranks(_behind, 2):
        for factor, (before, after, waits) in zip(FACTORS, seen, strict=True):
            assert not torch.allclose(before, after)
            torch.testing.assert_close(waits, factor * (before if factor < 1 else after), rtol=1e-9, atol=1e-12)


def _let_go(rank: Rank) -> list[bool]:
    """Return whether what reduced gradients in a group is gone once that is left, though the model stays: of steps of
    one pass, and of two.
    """
    gone = []
    for accumulate in (1, 2):
        parts = make_parts(Trial("allreduce"))
        for _ in range(2):
            parts.sync.begin_step(1, 1)
            for micro_batch in range(accumulate):
                with parts.sync.micro_batch(last=micro_batch == accumulate - 1):
                    parts.sync.module(torch.from_numpy(targets(0))).backward()
            parts.sync.step()
        hook = weakref.ref(parts.sync._hook)  # it has the group
        parts.sync.leave()
        gc.collect()
        gone.append(hook() is None)
    return gone


def test_a_group_that_is_left_is_not_kept_by_the_model() -> None:
    assert run_ranks(_let_go, 2) == [[True, True], [True, True]]
