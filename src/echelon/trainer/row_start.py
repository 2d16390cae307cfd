"""A built-in model whose tables begin row by row: a rank has memory for the rows that it keeps, and for no others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.config import RunConfig
from echelon.core.shards import Span, cut
from echelon.models import build_model
from echelon.models.base import ModelInput
from echelon.models.tables import make_sparse, sparse_tables
from echelon.parallel.deferred_init import DeferredInit, named_tensors, without_memory
from echelon.parallel.row_values import RowDraw, fill_rows
from echelon.trainer.world import World


def build_by_rows(config: RunConfig, data: ModelInput, world: World) -> nn.Module | None:
    """Build a model with sparse tables whose rows begin with values of their own (see `parallel.row_values`).

    Where the layout cuts tables, this rank's rows are all that the weights of these have. What else is random is drawn
    as ever. None, and nothing drawn, where tables cannot be made so: the values are a file's, the model is no built-in
    one, or it draws a table otherwise than element by element alike.
    """
    named = config.model
    if not named.sparse_tables or named.weights or "/" in named.name or ":" in named.name:
        return None
    generators = torch.get_rng_state()
    with without_memory() as recording:
        model = build_model(named, data)
    make_sparse(model, f"model {type(model).__name__}")
    weights = sparse_tables(model)
    draws = {name: RowDraw.of(recording, weight) for name, weight in weights.items()}
    tied = len(list(model.parameters())) < len(dict(model.named_parameters(remove_duplicate=False)))
    if tied or None in draws.values():
        torch.set_rng_state(generators)
        return None
    others = {name: tensor for name, tensor in named_tensors(model).items() if name not in weights}
    deferred = DeferredInit(recording, others, world.device)
    spans = {name: _own_span(len(weight), world) for name, weight in weights.items()}
    modules = dict(model.named_modules())
    for name, weight in weights.items():
        start, stop = spans[name]
        rows = weight.new_empty((stop - start, weight.shape[1]))
        modules[name.rpartition(".")[0]].weight = nn.Parameter(rows)
    deferred.give_memory([model])
    made = named_tensors(model)

    def keep(name: str, whole: Tensor) -> None:
        """Give a tensor its values."""
        made[name].detach().copy_(whole)

    deferred.fill(keep, weights.values())
    for name, draw in draws.items():
        assert draw is not None
        fill_rows(made[name].detach(), spans[name][0], draw, config.training.seed, name)
    return model


def _own_span(rows: int, world: World) -> Span:
    """Return the rows of a table that this rank keeps."""
    group: dist.ProcessGroup | None = world.placement.table_group if world.placement is not None else None
    return (0, rows) if group is None else cut((0, rows), group.size())[group.rank()]
