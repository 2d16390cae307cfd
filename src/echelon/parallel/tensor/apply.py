"""Split a model as planned: parameters become DTensors, layers compute on their local parts.

Whole tensors under plain names come from a split model and go into one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from echelon.core.errors import UserError
from echelon.core.hints import Hints, Style
from echelon.parallel.tensor.comm import Group, add, enter, gather, scatter_add, split
from echelon.parallel.tensor.layers import Split, drops
from echelon.parallel.tensor.local import Sight, embed_by_rows, first_row, local_part, localise
from echelon.parallel.tensor.plan import TensorPlan, placements_of, plan_tensor
from echelon.torch_compat import is_persistent, registered_tensors

TOKENS = 1  # the dim of tokens in (N, T, D)


@dataclass
class _Region:
    """What the layers between the first and the last block share: how many tokens all ranks together have."""

    tokens: int = 0


class _LayerInputs:
    """What the column layers of one attention module read: a tensor that several read is entered once."""

    def __init__(self) -> None:
        self._entered: list[tuple[Tensor, Tensor]] = []

    def enter(self, x: Tensor, group: Group) -> Tensor:
        """Return x, entered."""
        for known, entered in self._entered:
            if known is x:
                return entered
        self._entered.append((x, enter(x, group)))
        return self._entered[-1][1]

    def forget(self, *_: object) -> None:
        """Let go of all: a forward pass has ended."""
        self._entered.clear()


@dataclass(frozen=True)
class _Where:
    """One module's surroundings: its group, the region of split tokens where it stands in one, and the inputs that it
    shares with other layers of its attention module.
    """

    group: Group
    region: _Region | None
    inputs: _LayerInputs | None = None


def apply_tensor(
    model: nn.Module, mesh: DeviceMesh, hints: Hints | None, overrides: Mapping[str, Style], sequence_parallel: bool
) -> TensorPlan:
    """Split a whole model over a 1-D mesh, in place; see `plan_tensor` for the refusals and `apply_plan`."""
    plan = plan_tensor(model, mesh.size(), hints, overrides, sequence_parallel)
    apply_plan(model, mesh, plan)
    return plan


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Split a model, or a stage of it whose modules have the names of the whole, over a 1-D mesh, in place.

    Every rank must hold the same values: each keeps its part, and nothing is sent. All parameters become DTensors,
    those that are whole too; names and shapes stay. So do statistics of BatchNorms on local channels.
    """
    if mesh.size() != plan.tp or mesh.ndim != 1:
        raise ValueError(f"the plan is for tp={plan.tp}, the mesh has shape {tuple(mesh.shape)}")
    placements = placements_of(model, plan)
    splits = {name: plan.split(name, module) for name, module in model.named_modules()}
    modules = dict(model.named_modules())
    made: dict[int, nn.Parameter] = {}
    region = _Region() if plan.blocks else None
    inputs = {name: _LayerInputs() for name, module in modules.items() if plan.enters_by_layer(name, module)}
    for name, module in modules.items():
        split_, attention = splits[name], plan.attention_around(name)
        where = _Where(mesh.get_group(), region if plan.by_tokens(name) else None, inputs.get(attention))
        _distribute(module, mesh, split_, placements, made)
        _see_local(module, split_, shared=split_.shared or (where.region is not None and not attention))
        _listen(module, split_, where, enters=name not in inputs and (not attention or attention in inputs))
        if name in inputs:
            module.register_forward_hook(inputs[name].forget, always_call=True)
    if region is not None:
        _bound(modules, plan, _Where(mesh.get_group(), region))


def _distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    split_: Split,
    placements: Mapping[int, Placement],
    made: dict[int, nn.Parameter],
) -> None:
    for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(parameter) not in made:
            placement = placements.get(id(parameter), Replicate())
            data = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        module.register_parameter(leaf, made[id(parameter)])
    for leaf, buffer in list(module.named_buffers(recurse=False)):
        if isinstance(split_.placements.get(leaf), Shard):
            persistent = is_persistent(module, leaf)
            data = distribute_tensor(buffer, mesh, [split_.placements[leaf]], src_data_rank=None)
            module.register_buffer(leaf, data, persistent)


def _see_local(module: nn.Module, split_: Split, shared: bool) -> None:
    for name, value in split_.attributes.items():
        setattr(module, name, value)
    if isinstance(module, nn.Embedding) and split_.last == "rows":
        held = registered_tensors(module)["weight"]
        assert isinstance(held, DTensor)
        mesh = held.device_mesh
        embed_by_rows(module, first_row(held.shape[0], mesh.size(), mesh.get_local_rank()))
    sights: dict[str, Sight] = {}
    for leaf, tensor in registered_tensors(module).items():
        if isinstance(tensor, DTensor):
            whole = isinstance(tensor.placements[0], Replicate)
            sights[leaf] = split_.sights.get(leaf, Sight.SUMMED if whole and shared else Sight.LOCAL)
    localise(module, sights)


def _listen(module: nn.Module, split_: Split, where: _Where, enters: bool) -> None:
    """Put communication at a module's input and output."""
    if split_.first == "enter" and enters:
        module.register_forward_pre_hook(_on_first(lambda x: _enter(x, where)), with_kwargs=True)
    if split_.last == "add":
        module.register_forward_hook(lambda layer, _, result: _add(layer, result, where))
    elif split_.last == "gather":
        held = registered_tensors(module)["weight"]
        assert held is not None
        outputs, group = held.shape[0], where.group
        module.register_forward_hook(lambda _, __, y: gather(y, y.ndim - 1, outputs, group, shares=False))


def _enter(x: Tensor, where: _Where) -> Tensor:
    if where.inputs is not None:
        return where.inputs.enter(x, where.group)
    if where.region is None:
        return enter(x, where.group)
    return gather(x, TOKENS, where.region.tokens, where.group, shares=True)


def _add(layer: nn.Module, partial: Tensor, where: _Where) -> Tensor:
    by_tokens = where.region is not None
    y = scatter_add(partial, TOKENS, where.group) if by_tokens else add(partial, where.group)
    held = registered_tensors(layer)["bias"]
    if held is None:
        return y
    # After the sum, so that it counts once; its gradient is a share of the sum where each rank has other tokens.
    bias = local_part(held, summed=by_tokens).to(y.dtype)
    if _is_convolution(layer):
        bias = bias.view(-1, *[1] * (len(layer.kernel_size)))  # type: ignore[arg-type]
    return y + bias


def _is_convolution(layer: nn.Module) -> bool:
    """Whether a layer's outputs are a dim before others (a convolution's), not the last one."""
    return hasattr(layer, "kernel_size")


def _bound(modules: Mapping[str, nn.Module], plan: TensorPlan, where: _Where) -> None:
    """Split tokens before the first block that is here, join them after the last."""
    blocks = [modules[name] for name in plan.blocks if name in modules]
    if not blocks:
        return
    random = [name for name, module in modules.items() if plan.by_tokens(name) and drops(module)]
    region = where.region
    assert region is not None

    def begin(x: Tensor) -> Tensor:
        """Return this rank's tokens of x (N, T, D).

        Raises:
            UserError: x holds no tokens, or random numbers would differ between ranks.
        """
        if x.ndim != 3:
            raise UserError(f"sequence: the first block gets {x.ndim} dims, not tokens (N, T, D): leave sequence away")
        if random and x.shape[TOKENS] % plan.tp:
            raise UserError(
                f"sequence: {x.shape[TOKENS]} tokens do not divide by tp={plan.tp}, so that the ranks' random numbers "
                f"would part at {random[0]}: set its dropout to 0, or leave sequence away"
            )
        region.tokens = x.shape[TOKENS]
        return split(x, TOKENS, where.group)

    def end(_: nn.Module, __: Any, result: Any) -> Any:
        """Join the ranks' tokens of the last block's result."""
        y = result[0] if isinstance(result, tuple) else result
        whole = gather(y, TOKENS, region.tokens, where.group, shares=False)
        return (whole, *result[1:]) if isinstance(result, tuple) else whole

    blocks[0].register_forward_pre_hook(_on_first(begin), with_kwargs=True)
    blocks[-1].register_forward_hook(end)


def _on_first(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a hook that changes a module's first input, given by place or by name."""

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, object]]:
        """Change the first argument, or the first named one that is a tensor."""
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name, first = next((key, value) for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: change(first)}

    return hook


@torch.no_grad()
def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole model's state on every rank, in the original order; all ranks of the mesh call it together."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, of the model's shapes before the split and the same on every rank, into a split model.

    Raises:
        ValueError: names or shapes are not the model's.
    """
    own = model.state_dict()
    if set(own) != set(state):
        raise ValueError(f"names differ: {sorted(set(own) ^ set(state))[:4]}")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise ValueError(f"{name} is {tuple(state[name].shape)}, the model's is {tuple(tensor.shape)}")
        if isinstance(tensor, DTensor):
            given = state[name].to(tensor.dtype).to(tensor.to_local().device)
            part = distribute_tensor(given, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())
        else:
            tensor.copy_(state[name])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
