"""The forecast of memory: a step rehearsed without data, without processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.config import build
from echelon.data.base import DataInfo
from echelon.forecast.memory import Memory, forecast
from echelon.models import Hints, ModelInput
from echelon.models.builtin.small_vit import Size, SmallViT
from echelon.run.resolve import resolve
from echelon.tasks.nest import TensorSpec

INFO = DataInfo("any", tuple("abcdefghij"), 3, 32, 64, 16, (8,) * 10)
SIZE = Size(depth=3, width=128, heads=4, hidden=512)


def predict(
    parallel: str, ranks: int, model: nn.Module | None = None, info: DataInfo = INFO, **settings: Any
) -> tuple[Memory, ...]:
    given = {"strategy.parallel": parallel, "optimizer.name": "adamw", "data.batch_size": 16}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    with torch.device("meta"):
        whole = model or SmallViT(ModelInput(10, 3, 32), SIZE)
    found = forecast(resolve(build(None, given).config), info, ranks, whole)
    assert not dist.is_initialized() and not found.unknown
    return found.memory


def test_a_cut_table_takes_a_part_of_its_memory_and_of_its_moments() -> None:
    def tables() -> nn.Module:
        """Return a table and a layer."""
        return nn.Sequential(nn.Embedding(1000, 64, sparse=True), nn.Flatten(), nn.Linear(64 * 4, 10))

    info = replace(INFO, several=TensorSpec((4,), "int64", count=1000))
    given: dict[str, Any] = {"info": info, "optimizer__name": "sparse_adam", "optimizer__weight_decay": 0.0}
    with torch.device("meta"):
        models = tables(), tables()
    (whole,), (cut,) = predict("dp=4", 4, models[0], **given), predict("dp=4,table=4", 4, models[1], **given)
    rows = 750 * 64 * 4
    assert (whole.parameters - cut.parameters, whole.optimizer - cut.optimizer) == (rows, 2 * rows)


def test_a_worker_of_servers_has_the_rows_that_a_batch_looks_up(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(
        "user,item,rating\n" + "".join(f"{i},{i + 1},{i % 5}.5\n" for i in range(2000))
    )

    def of(sync: str) -> Memory:
        """Return what a rank needs of two towers."""
        given: dict[str, Any] = {
            "data.source": str(tmp_path / "ratings.csv"), "data.input": "user,item", "data.target": "rating",
            "task": "recommendation", "model.name": "two_tower", "model.sparse_tables": True,
            "optimizer.name": "adagrad", "optimizer.weight_decay": 0.0, "strategy.sync": sync, "data.batch_size": 8,
        }  # fmt: skip
        run = resolve(build(None, given).config)
        found = forecast(run, run.source.open().info, 2)
        assert not found.unknown
        return found.memory[0]

    whole, served = of("allreduce"), of("ps(mode=async)")
    rows = 2 * 8  # at most, of each table
    assert whole.parameters - served.parameters > 2 * (1800 - rows) * 16 * 4
    assert served.peak < whole.peak / 2


def test_one_process_has_what_its_tensors_take() -> None:
    (found,) = predict("dp=1", 1)
    with torch.device("meta"):
        bytes_ = sum(p.nbytes for p in SmallViT(ModelInput(10, 3, 32), SIZE).parameters())
    assert found.parameters == found.gradients == bytes_
    assert found.optimizer == pytest.approx(2 * bytes_, rel=0.01)
    assert found.checkpoint == pytest.approx(3 * bytes_, rel=0.01)
    assert found.peak <= found.parameters + found.gradients + found.optimizer + found.buffers + found.activations
    # A token's vectors: 2 norms, 3 of qkv, attention, 2 sums, 8 of the hidden layer before and after GELU.
    kept = 16 * 64 * 128 * 4 * SIZE.depth * 16
    assert kept < found.activations < 1.3 * kept


def test_what_is_frozen_has_no_gradient_moments_or_error_memory() -> None:
    (whole,) = predict("dp=2", 2, strategy__compression="sign")
    (tuned,) = predict("dp=2", 2, strategy__compression="sign", model__tune="head")
    head = SIZE.width * 10 * 4 + 10 * 4
    assert tuned.parameters == whole.parameters and tuned.gradients == head
    assert tuned.optimizer == pytest.approx(2 * head, abs=64)
    assert tuned.sync < whole.sync / 50 and tuned.activations < whole.activations / 2


def test_micro_batches_of_micro_batches_are_forecast() -> None:
    first, last = predict("pp=2,microbatches=2", 2, strategy__cuts="blocks.1", training__accumulate=2)
    assert min(first.peak, last.peak) > 0


def test_strategies_and_codecs_add_what_they_keep() -> None:
    (alone,) = predict("dp=1", 1)
    whole = alone.parameters
    (local,) = predict("dp=2", 2, strategy__sync="local(8)", launch__elastic="off")
    (elastic,) = predict("dp=2", 2, strategy__sync="local(8)")
    codec = {"strategy__compression": "int8", "launch__elastic": "off"}
    (diloco,) = predict("dp=2", 2, strategy__sync="diloco(8)", **codec)
    (behind,) = predict("dp=2", 2, strategy__sync="diloco(8, overlap=2)")
    (overlapped,) = predict("dp=2", 2, strategy__sync="local(8, overlap=2)")
    (coded,) = predict("dp=2", 2, strategy__compression="sign")
    (split,) = predict("tp=2,dp=2", 4, strategy__sync="local(8)")
    assert (local.sync, diloco.sync, behind.sync) == (whole, 2 * whole, 4 * whole)
    assert local.checkpoint == diloco.checkpoint - whole == alone.checkpoint + whole
    assert local.peak >= alone.parameters + alone.optimizer + 3 * whole, "deltas, and the vectors they are reduced in"
    copy = alone.parameters + alone.optimizer + local.sync
    assert elastic.sync - local.sync == elastic.peak - local.peak == copy, "of the replica, to which survivors return"
    assert overlapped.sync == 3 * whole + copy + alone.optimizer, "and of the optimizer's state while a mean travels"
    assert elastic.checkpoint == local.checkpoint
    assert coded.sync == pytest.approx(4 * whole, rel=0.02), "a vector, error feedback of both directions, its copies"
    assert split.sync == split.parameters < 0.6 * whole


def test_workers_of_a_server_have_no_optimizer() -> None:
    (alone,) = predict("dp=1", 1)
    (worker,) = predict("dp=2", 2, strategy__sync="ps(mode=async)", training__ema=0.9)
    assert worker.optimizer == worker.averages == 0
    assert worker.sync == alone.parameters
    assert worker.peak >= 4 * alone.parameters


def test_layouts_divide_what_they_divide() -> None:
    (alone,) = predict("dp=1", 1)
    (sharded,) = predict("fsdp=2", 2)
    (divided,) = predict("dp=2,zero1", 2)
    (tensor,) = predict("tp=2", 2)
    first, last = predict("pp=2,microbatches=2", 2, strategy__cuts="blocks.1")
    assert sharded.parameters == pytest.approx(alone.parameters / 2, rel=0.03)  # rank 0 has what is one row
    assert sharded.optimizer == pytest.approx(alone.optimizer / 2, rel=0.03)
    assert divided.optimizer == pytest.approx(alone.optimizer / 2, rel=0.1)
    assert divided.parameters == alone.parameters
    assert alone.activations / 2 < tensor.activations < 0.8 * alone.activations
    assert first.parameters + last.parameters == alone.parameters
    assert all(each.peak < alone.peak for each in (sharded, divided, tensor, first, last))


def test_a_plan_of_the_runs_own_is_rehearsed_without_values() -> None:
    (whole,) = predict("tp=2", 2)
    (more,) = predict("tp=2", 2, strategy__tensor_plan="blocks.*.mlp.fc1=replicate,blocks.*.mlp.fc2=replicate")
    assert more.parameters > whole.parameters


def test_recomputing_keeps_less_and_averages_take_as_much_as_the_weights() -> None:
    (alone,), (again,) = predict("dp=1", 1), predict("dp=1", 1, training__recompute="blocks")
    assert again.activations < alone.activations / 2
    (averaged,) = predict("dp=1", 1, training__ema=0.9)
    assert averaged.averages == alone.parameters


def test_narrow_types_keep_less() -> None:
    (wide,), (narrow,) = predict("dp=1", 1), predict("dp=1", 1, training__precision="fp16")
    assert narrow.activations < 0.8 * wide.activations


class Reader(nn.Module):
    """Tells runs of token ids apart."""

    structure = Hints(chain=("embedding", "layers", ":choose"), glue={":choose": ("head",)})

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 128)
        self.layers = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
        self.head = nn.Linear(128, 10)

    def choose(self, x: Tensor) -> Tensor:
        """Return logits of (N, T, 128)."""
        return self.head(x.mean(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of ids (N, T)."""
        return self.choose(self.layers(self.embedding(tokens)))


@pytest.mark.parametrize("tokens", [64, 256])
def test_token_ids_are_rehearsed_as_they_are(tokens: int) -> None:
    info = replace(INFO, channels=tokens, image_size=1, shape=(tokens,), dtype="int64")
    with torch.device("meta"):
        model = Reader()
    (found,) = predict("dp=1", 1, model, info)
    # A token's vectors: the embedding's, 4 + 4 of the hidden layer before and after GELU, the last one's.
    kept = 10 * tokens * 128 * 4 * 16
    # Beside them the gradients of the hidden layer.
    assert kept < found.activations < 1.9 * kept
    first, last = predict("pp=2,microbatches=2", 2, model, info)
    assert first.parameters + last.parameters == found.parameters
    assert 0 < last.activations < found.activations


def test_vectors_are_rehearsed_as_they_are() -> None:
    info = replace(INFO, channels=20, image_size=1, shape=(20,), dtype="float64")
    (found,) = predict("dp=1", 1, nn.Sequential(nn.Linear(20, 4096), nn.ReLU(), nn.Linear(4096, 10)).double(), info)
    kept = 2 * 4096 * 8 * 16
    assert 0.4 * kept < found.activations < 2 * kept


class Picky(nn.Module):
    """Does what depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.layer(x.flatten(1))
        return x * 2 if x.sum().item() > 0 else x


def test_a_model_to_which_values_matter_is_not_predicted() -> None:
    found = forecast(resolve(build(None, {"strategy.parallel": "dp=1"}).config), INFO, 1, Picky())
    assert not found.memory and "DataDependent" in found.unknown


def test_what_a_neighbour_keeps_is_told_apart() -> None:
    (sharded,), (divided,) = predict("fsdp=2", 2), predict("dp=2,zero1", 2)
    assert sharded.copies == 3 * sharded.parameters + sharded.optimizer, "and two vectors of gradients, on their way"
    assert divided.copies == divided.optimizer
    (off,) = predict("fsdp=2", 2, launch__elastic="off")
    assert not off.copies and off.peak == sharded.peak
    assert not any(each.copies for layout in ("dp=2,fsdp=2", "tp=2,dp=2") for each in predict(layout, 4))
