"""Split a model as planned: parameters become DTensors, layers compute on their local parts.

Whole tensors under plain names come from a split model and go into one; and a plan that nobody declared is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import FAKE_TENSOR_LOGGER, detect_fake_mode, is_persistent, registered_tensors

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


# Sums over ranks are made in another order: some ulps of a network's depth; a wrong split is off by the whole.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
# Of a layer's gradient: a ReLU whose input is about zero may turn, which in float32 is 0.4% of a ResNet-50's.
GRADIENT_TOLERANCE = {torch.float64: 1e-7, torch.float32: 3e-2}
SKETCH = 8


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Answer:
    """What a model answers an example.

    Attributes:
        logits: its first output `(B, ...)`.
        gradients: sketches of the trainable parameters' gradients, by name in the order of backward; empty where the
            output has none, as a pipeline's.
    """

    logits: Tensor
    gradients: Mapping[str, Tensor]


def answer(model: nn.Module, example: Nest) -> Answer:
    """Return what the model answers an example, in evaluation mode; all ranks of the group call it together.

    Of gradients there is one at a time: those of a whole model may not fit beside it.
    """
    was_training = model.training
    model.eval()
    has_rnn = any(isinstance(module, nn.RNNBase) for module in model.modules())
    try:
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False) if has_rnn else nullcontext():
            result = nest.call(model, example)
            logits = getattr(result, "logits", None)
            if not isinstance(logits, Tensor):
                logits = next(leaf for leaf in nest.leaves(result) if isinstance(leaf, Tensor))
            return Answer(logits.detach(), _gradients(model, logits))
    finally:
        model.train(was_training)


def _gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """Return sketches of the gradients of a random sum of logits."""
    sketches: dict[str, Tensor] = {}
    if not logits.requires_grad or detect_fake_mode((logits,)) is not None:  # a rehearsal: there are no values
        return sketches

    def take(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        sketches[name] = _sketch(parameter.grad)
        parameter.grad = None

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(partial(take, name)) for name, parameter in named]
    try:
        logits.backward(_random(logits.shape, logits))
    finally:
        for each in hooks:
            each.remove()
    return sketches


def _sketch(gradient: Tensor) -> Tensor:
    """Return random projections `(SKETCH, SKETCH)` of a gradient of any shape, whose norm is about its own."""
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    dense = torch.view_as_real(full) if full.is_complex() else full.to_dense()
    matrix = nest.exact(dense.reshape(len(dense), -1) if dense.ndim > 1 else dense.reshape(1, -1))
    left, right = _random((SKETCH, matrix.shape[0]), matrix), _random((matrix.shape[1], SKETCH), matrix)
    return left @ matrix @ right / SKETCH


def _random(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return normal random numbers, the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def same_function(model: nn.Module, example: Nest, before: Answer) -> None:
    """Check that the split model answers an example as it did `before` it was split, and that gradients are the same.

    Use it where the plan was found or written by the user; the example should be random, not blank.

    Raises:
        UserError: it fails, or answers otherwise.
    """
    advice = (
        "write --tensor-plan by hand, or change yours: layers that follow each other are column and then row, or both "
        "replicate (a fused qkv ordered by head is column, by q, k, v column(parts=3))"
    )
    try:
        with _quiet(FAKE_TENSOR_LOGGER):  # it logs a traceback of what is refused in words here
            after = answer(model, example)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"tp: the split model cannot compute one batch ({reason}): {advice}") from error
    if detect_fake_mode((before.logits, after.logits)) is not None:  # a rehearsal: there are no values
        return
    difference = _difference(before.logits, after.logits)
    if not difference <= TOLERANCE.get(before.logits.dtype, 0.1):
        raise UserError(
            f"tp: the split model is not the same function (logits differ by {difference:.1e} of the largest): {advice}"
        )
    if after.gradients:
        _check_gradients(model, before, after)


def _difference(before: Tensor, after: Tensor) -> float:
    scale = before.abs().max().clamp(min=1e-6)
    return float((after - before).abs().max() / scale) if after.shape == before.shape else float("inf")


def _check_gradients(model: nn.Module, before: Answer, after: Answer) -> None:
    """Refuse a split model with other gradients, on any rank; backward was right up to the layer that is named."""
    tolerance = GRADIENT_TOLERANCE.get(before.logits.dtype, 0.3)
    known = {name: sketch for name, sketch in before.gradients.items() if sketch.isfinite().all()}
    if not known:
        return
    sizes = {name: sketch.norm() for name, sketch in known.items()}
    # Of a gradient that is zero, such as that of the bias of attention's keys, rounding leaves something.
    rounding = 16 * torch.finfo(before.logits.dtype).eps * torch.stack(list(sizes.values())).norm()
    modules: dict[str, Tensor] = {}
    for name, size in sizes.items():
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0) + size
    excesses = []
    for name, sketch in known.items():
        after_split = after.gradients.get(name, torch.full_like(sketch, torch.inf))
        allowed = tolerance * modules[name.rpartition(".")[0]] + rounding
        excesses.append((after_split - sketch).norm() - allowed)
    differs = (~(torch.stack(excesses) <= 0)).int()
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    dist.all_reduce(differs, dist.ReduceOp.MAX, group=mesh.get_group())
    for name, wrong in zip(known, differs.tolist(), strict=True):
        if wrong:
            module = name.rpartition(".")[0]
            shared = f"if it works on split units, write --tensor-plan {module}=shared; else " if module else ""
            raise UserError(
                f"tp: the split model's gradient of {name} is not that of the model: {shared}keep the layers after it "
                "whole, with the style replicate"
            )
