"""The repeated blocks of a model: found, sharded over the ranks of a replica, computed again in backward.

Sharding (`fully_shard`; Zhao et al. 2023, arXiv:2304.11277): each rank keeps 1/N of every tensor (rows), gathers a
block's parameters for its forward and backward, and keeps its part of the summed gradient. Between replicas `sync` acts
on the shards. Recomputation (Chen et al. 2016, arXiv:1604.06174): backward computes again what forward did not keep.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from echelon.core.errors import UserError
from echelon.core.hints import Hints, matching
from echelon.parallel.reach import BlockOrder, ReachedShards
from echelon.torch_compat import ATTENTION_OPS, BatchNormBase, tree_leaves

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

LEAST_SHARE = 0.5  # of the parameters that repeated classes must hold to count as the model's blocks
_FACTS = frozenset(
    ("device", "dim", "dtype", "is_cuda", "is_floating_point", "ndim", "numel", "requires_grad", "shape", "size")
)
"""What a sharded parameter says of itself as the whole one does."""


def find_blocks(model: nn.Module, hints: Hints | None) -> dict[str, nn.Module]:
    """Return the blocks by name, in the order of the model's modules; empty where nothing repeats.

    From `hints.blocks` where there are hints; else the children of every ModuleList and Sequential that is not inside
    another block and that holds several modules of one class; else every module of the class, repeated at least
    twice, that holds most of the parameters. No block is inside another, and none is a plain container of blocks.
    """
    named = dict(model.named_modules())
    if hints is not None and hints.blocks:
        found = matching(hints.blocks, named)
        return {name: named[name] for name in named if name in found}
    blocks = _in_containers(named)
    return blocks or _by_class(named)


def _in_containers(named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    found = dict(_blocks_under("", named[""], set()))
    return {name: found[name] for name in named if name in found}


def _blocks_under(prefix: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the innermost repeated children of containers; what is in a block is not looked at."""
    classes: Counter[type] = Counter()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        classes = Counter(type(child) for child in module.children() if _has_own(child))
    for key, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        name = f"{prefix}.{key}" if prefix else key
        repeated = classes[type(child)] > 1 and next(child.children(), None) is not None
        inner = list(_blocks_under(name, child, seen)) if not repeated or _is_plain_container(child) else []
        if inner:
            yield from inner
        elif repeated and _has_own(child) and not isinstance(child, nn.ModuleList):  # a list has no forward pass
            yield name, child


def _is_plain_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _by_class(named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    total = sum(p.numel() for p in named[""].parameters())
    classes = Counter(type(m) for m in named.values())
    for kind, count in classes.items():
        of_kind = {n: m for n, m in named.items() if type(m) is kind and n}
        outer = {n: m for n, m in of_kind.items() if not _inside(n, {k: v for k, v in of_kind.items() if k != n})}
        held = sum(p.numel() for m in outer.values() for p in m.parameters())
        if count > 1 and len(outer) > 1 and held >= LEAST_SHARE * total:
            return outer
    return {}


def _inside(name: str, blocks: Mapping[str, nn.Module]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def read_outside(model: nn.Module, blocks: Mapping[str, nn.Module], forward: Callable[[], object]) -> set[str]:
    """Return the blocks of which a forward pass of the model reads a parameter while the block itself is not running.

    Such as a weight that is used transposed a second time, or that a penalty is taken of. Sharded by itself, a block
    has only pieces of its parameters then.

    Args:
        forward: computes an example by the whole model; its buffers and the random numbers are put back afterwards.
    """
    watch = _OutsideReads(blocks)
    hooks = []
    for name, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(partial(watch.enter, name)))
        hooks.append(block.register_forward_hook(partial(watch.leave, name), always_call=True))
    cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), _keeping_buffers(model), watch:
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return watch.found


class _OutsideReads(TorchFunctionMode):
    """Looks at the arguments of every function of torch for parameters of blocks that are not running."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._holders = {id(p): name for name, block in blocks.items() for p in block.parameters()}
        self._running: Counter[str] = Counter()

    def enter(self, name: str, block: nn.Module, inputs: Any) -> None:
        """Note that a block begins."""
        self._running[name] += 1

    def leave(self, name: str, block: nn.Module, inputs: Any, outputs: Any) -> None:
        """Note that a block ends, by an error too."""
        self._running[name] -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        property_of = getattr(func, "__self__", None)
        if _FACTS.isdisjoint((getattr(func, "__name__", ""), getattr(property_of, "__name__", ""))):
            for each in tree_leaves((args, kwargs)):
                name = self._holders.get(id(each), "")
                if name and not self._running[name]:
                    self.found.add(name)
        return func(*args, **(kwargs or {}))


def shard(
    model: nn.Module, blocks: Mapping[str, nn.Module], mesh: DeviceMesh, param_dtype: torch.dtype | None = None
) -> ReachedShards:
    """Shard a model in place over a 1-D mesh: each block by itself, then what is left with the root.

    Gradients are summed, not averaged: losses are divided by the global batch. What a rank's backward pass does not
    reach has zeros there, for others may reach it; what is returned knows which these are.

    Args:
        param_dtype: type of the gathered copies that forward and backward use; gradients are summed in float32.

    Raises:
        UserError: a parameter has no rows to share, or narrow ones would be BatchNorm's.
    """
    if param_dtype is not None and any(isinstance(m, BatchNormBase) for m in model.modules()):
        raise UserError(
            f"--parallel fsdp={mesh.size()} with --precision bf16-params: BatchNorm's statistics would be lost in "
            "bfloat16; use --precision bf16, or dp=N"
        )
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if param_dtype:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise UserError(
                f"--parallel fsdp={mesh.size()}: the parameter {name} is a single number and has no rows: make it "
                "one row, torch.ones(1), or use dp=N"
            )
        if parameter.is_complex():
            raise UserError(
                f"--parallel fsdp={mesh.size()}: the parameter {name} is complex, and only real ones are sharded: "
                "use dp=N"
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    empty = {parameter for parameter in model.parameters() if not parameter.numel()}
    separate = _separate(model, blocks)
    _check_types(model, separate, mesh)
    for block in separate.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=empty)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=empty)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # older ones have no way to do it
            module.set_reduce_scatter_unused_params(True, recurse=False)
    BlockOrder(model, separate, mesh)
    return ReachedShards({"": model, **separate})


def _separate(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks that share no parameter with what is outside of them: tied ones are the root's to gather."""
    holders: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((each for each in blocks if name.startswith(f"{each}.")), "")
        holders.setdefault(id(parameter), set()).add(block)
    tied = {block for names in holders.values() if len(names) > 1 for block in names}
    return {name: block for name, block in blocks.items() if name not in tied}


def _check_types(model: nn.Module, blocks: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    """Refuse parameters of two types that are gathered together.

    Raises:
        UserError: names the first that is of another type than those before it.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel() or not parameter.requires_grad:  # frozen ones may be of any type
            continue
        block = next((each for each in blocks if name.startswith(f"{each}.")), "")
        other, dtype = first.setdefault(block, (name, parameter.dtype))
        if parameter.dtype != dtype:
            here, there = (str(each).removeprefix("torch.") for each in (parameter.dtype, dtype))
            raise UserError(
                f"--parallel fsdp={mesh.size()}: the parameter {name} is {here} and {other} is {there}, and those that "
                "are gathered together must be of one type: make them so, or use dp=N"
            )


@contextmanager
def kept_gathered(model: nn.Module) -> Iterator[None]:
    """Keep the parameters that forward passes gather until the block ends, so that many in a row gather them once.

    Each rank then holds the whole model. All ranks that share it enter together.
    """
    sharded = _sharded(model)
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded[1:]:  # the first is the root, which torch leaves gathered
            module.set_reshard_after_forward(True, recurse=False)
        reshard(model)


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters: a forward pass without backward leaves the root's, which then grow stale."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was applied to: whoever did has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


Recompute = Literal["none", "blocks", "selective"]
_ATEN = torch.ops.aten
# What costs most to compute again for what it takes to keep: products of matrices, convolutions, attention.
_PRODUCTS = (_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm, _ATEN.convolution)
KEPT = frozenset((*(op.default for op in _PRODUCTS), *ATTENTION_OPS))


def recompute_blocks(blocks: Mapping[str, nn.Module], how: Recompute) -> None:
    """Make backward compute each block's activations again, in place; names of parameters stay.

    `blocks` keeps a block's inputs alone; `selective` also the results of matrix products, convolutions and attention.
    """
    for block in blocks.values() if how != "none" else ():
        block.forward = partial(_recomputed, block, block.forward, how == "selective")


def _recomputed(block: nn.Module, forward: Callable[..., Any], selective: bool, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    contexts = partial(_contexts, block, selective)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(block: nn.Module, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if selective:
        first, again = create_selective_checkpoint_contexts(_policy)
    return first, _both(_keeping_buffers(block), again)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _keeping_buffers(block: nn.Module) -> Iterator[None]:
    """Give buffers the values back that they have now: a second pass must not enter BatchNorm's statistics."""
    own = [(m, name, b, b.clone()) for m in block.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in own:
                buffer.copy_(value)
                setattr(module, name, buffer)  # forward may have put another in its place


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
