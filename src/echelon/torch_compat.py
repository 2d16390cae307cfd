"""What the package uses of torch without its being public: the one place to look when a new torch is out.

Private names move without notice. All of these were seen in torch 2.11.0 and in 2.15.0; the tests import every one,
so that a version that has moved one fails there and not in a run. Nothing here imports `torch.distributed.tensor`
before it is asked for.

    name here               name in torch
    BatchNormBase           torch.nn.modules.batchnorm._BatchNorm
    ConvNd                  torch.nn.modules.conv._ConvNd
    DropoutNd               torch.nn.modules.dropout._DropoutNd
    FakeTensorMode, ...     torch._subclasses.fake_tensor
    detect_fake_mode        torch._guards
    TorchDispatchMode       torch.utils._python_dispatch
    tree_flatten, ...       torch.utils._pytree
    reparametrized          torch.nn.utils.stateless._reparametrize_module
    foreach_copy_, ...      torch._foreach_copy_, ...
    assert_async            torch._assert_async
    inject_parametrized_... torch.nn.utils.parametrize._inject_new_class, _inject_property
    storage_key             torch.UntypedStorage._cdata
    generator_words         torch.Generator._cdata
    is_operator, schema_of  torch._ops.OpOverload._schema
    is_compiled, COMPILED   torch._dynamo.OptimizedModule._orig_mod
    conv_forward            torch.nn.Conv1d._conv_forward, ...
    ignore_in_ddp           DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    has_comm_hook           DistributedDataParallel._comm_hooks
    unscales_itself, ...    torch.optim.Optimizer._step_supports_amp_scaling
    trunc_normal_replaced   torch.nn.init._no_grad_trunc_normal_
    set_timeout             torch.distributed.set_timeout, before torch had it: distributed_c10d._set_pg_timeout
    forget_failed_groups    torch.distributed.distributed_c10d._world.group_count
    mesh_join_replaced      DeviceMesh._concatenate
    step_microbatches       PipelineSchedule..._step_microbatches, _merge_outputs, before torch had them in `step`
    spare_dynamo            torch._compile._disable_dynamo's __dynamo_disable, torch.optim.optimizer._use_grad_for_...
    build_ddp               torch._dynamo.utils.get_optimize_ddp_mode

Beside these `backward_in_evaluation` gets around what cuDNN does not have. One more, `torch._dynamo`, is in
`core.system`, for who needs it without torch.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import _inject_new_class as inject_parametrized_class
from torch.nn.utils.parametrize import _inject_property as inject_parametrized_property
from torch.nn.utils.stateless import _reparametrize_module as reparametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

__all__ = [
    "ATTENTION_OPS",
    "COMPILED",
    "CTC_LOSS",
    "CTC_LOSS_BACKWARD",
    "DDP_MODE",
    "FAKE_TENSOR_LOGGER",
    "GATHERS",
    "NEEDS_VALUES",
    "BatchNormBase",
    "ConvNd",
    "DropoutNd",
    "FakeTensorMode",
    "TorchDispatchMode",
    "assert_async",
    "build_ddp",
    "conv_forward",
    "copy_with",
    "detect_fake_mode",
    "fake_store",
    "foreach_add_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sub_",
    "group_timeout",
    "has_comm_hook",
    "ignore_in_ddp",
    "inject_parametrized_class",
    "inject_parametrized_property",
    "is_compiled",
    "is_dtensor",
    "is_operator",
    "is_persistent",
    "local_tensor",
    "mesh_join_replaced",
    "registered_modules",
    "registered_tensors",
    "reparametrized",
    "same_ranks_group",
    "schema_of",
    "set_unscales_itself",
    "spare_dynamo",
    "step_microbatches",
    "storage_key",
    "strided_shard",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "trunc_normal_replaced",
    "unscales_itself",
    "unset_fake_temporarily",
    "uses_nccl",
]

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""The logger that says a traceback of whatever a tensor without data refuses."""

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What a forward pass on tensors without data raises where it depends on their values."""

ATTENTION_OPS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""The operators that scaled_dot_product_attention becomes."""

CTC_LOSS = torch.ops.aten._ctc_loss.Tensor
CTC_LOSS_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor

GATHERS = {torch.ops.c10d._allgather_base_.default: 0, torch.ops.c10d._reduce_scatter_base_.default: 1}
"""The operators of all-gather and reduce-scatter, and which of their arguments is the gathered tensor."""

_TWISTER_WORDS = 624
_TWISTER_AT_MOST = 256  # bytes in front of the words of a generator
assert_async = torch._assert_async
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_add_ = torch._foreach_add_
foreach_sub_ = torch._foreach_sub_


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long a collective of a group waits; torch has no public way to ask."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout = group._get_backend(device).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


def uses_nccl(group: dist.ProcessGroup) -> bool:
    """Whether tensors on a GPU travel through NCCL in a group; `cpu:gloo,cuda:nccl` is such a backend."""
    return "nccl" in str(dist.get_backend(group))


def same_ranks_group(
    group: dist.ProcessGroup, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make another group of the same ranks; all of them call it together.

    Args:
        backend: such as gloo; None: the default.
        timeout: None: the group's own (torch gives a new group half an hour unless told).
    """
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, timeout or group_timeout(group), backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def step_microbatches(
    schedule: Any, inputs: list[tuple[Tensor, ...]] | None, targets: list[Tensor] | None, return_outputs: bool
) -> Tensor | None:
    """Run a step of a torch pipeline schedule on micro-batches `(b, ...)`; returns the last stage's outputs, if asked.

    The `step` of torch 2.15 takes them as they are; that of torch 2.11 cuts a whole batch by itself.
    """
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        outputs: Tensor | None = schedule.step(arg_mbs=inputs, target_mbs=targets, return_outputs=return_outputs)
        return outputs
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(inputs, None, targets, None, return_outputs)
    merged = [schedule._merge_outputs(stage.output_chunks) for stage in stages if stage.is_last and return_outputs]
    return merged[0] if merged else None


def fake_store() -> Any:
    """Return a store for `init_process_group("fake", ...)`: a world whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def local_tensor(tensor: DTensor) -> Tensor:
    """Return a DTensor's local part, any shape, in the same memory and outside of autograd."""
    local: Tensor = tensor._local_tensor
    return local


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor, without importing what makes them: half as much as all of torch, with sympy."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement that takes one chunk of each of `split_factor` equal parts of a dim."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


COMPILED = "_orig_mod."
"""What names of a compiled module's parameters begin with."""


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has wrapped a module."""
    return hasattr(module, "_orig_mod")


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer enters its state_dict."""
    return buffer not in module._non_persistent_buffers_set


def registered_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own children by name, each as often as it is registered."""
    return dict(module._modules)


def registered_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own parameters and buffers as they are registered, whatever its attributes show instead."""
    return {**module._parameters, **module._buffers}


def registered_buffers(model: nn.Module) -> list[dict[str, Tensor | None]]:
    """Return what modules of a model have registered of buffers of their own, by name: live, of those that have some.

    A buffer that is assigned anew is another tensor under the same name.
    """
    return [module._buffers for module in model.modules() if module._buffers]


def copy_with(
    module: nn.Module, children: Mapping[str, nn.Module | None], tensors: Mapping[str, Tensor | None]
) -> nn.Module:
    """Return a shallow copy of a module with some of its children, and of its own tensors, of any shape."""
    copied = copy.copy(module)
    copied._modules = dict(children)
    copied._parameters = {name: p for name, p in module._parameters.items() if name in tensors}
    copied._buffers = {name: b for name, b in module._buffers.items() if name in tensors}
    return copied


def generator_words(generator: torch.Generator) -> int | None:
    """Return the address of the 624 words (32 bits each) of a CPU's generator; None: they are not where they were."""
    legacy = generator.get_state()[24 : 24 + 8 * _TWISTER_WORDS].view(torch.int64)  # behind seed, counts and place
    words = legacy.to(torch.int32).numpy().tobytes()
    begin: int = generator._cdata  # type: ignore[attr-defined]
    for address in range(begin, begin + _TWISTER_AT_MOST, 4):
        if ctypes.string_at(address, 16) == words[:16] and ctypes.string_at(address, len(words)) == words:
            return address
    return None


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has while this one lives; storages without memory have one too."""
    return int(storage._cdata)


def is_operator(function: object) -> bool:
    """Whether a recorded function is an operator of torch, which has a schema, and not one in Python."""
    return hasattr(function, "_schema")


def schema_of(operator: Any) -> torch.FunctionSchema:
    """Return the schema of an operator that a dispatch mode is called with."""
    schema: torch.FunctionSchema = operator._schema
    return schema


def conv_forward(kind: Any) -> object:
    """Return the method by which a class of convolutions computes, `forward` aside."""
    return kind._conv_forward


@contextmanager
def backward_in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let forward passes in evaluation mode be followed by backward passes: cuDNN's recurrent layers have none then,
    and torch's own take their place.
    """
    has_rnn = any(isinstance(each, nn.RNNBase) for module in modules for each in module.modules())
    with torch.backends.cudnn.flags(enabled=False) if has_rnn else nullcontext():
        yield


def ignore_in_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Let a DistributedDataParallel that is built of a model leave these parameters and buffers alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered."""
    return bool(ddp._comm_hooks)


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step divides gradients by the scale of a `GradScaler` by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def set_unscales_itself(optimizer: torch.optim.Optimizer, value: bool) -> None:
    """Say so to a `GradScaler`, which leaves it to the step then."""
    optimizer._step_supports_amp_scaling = value  # type: ignore[attr-defined]


@contextmanager
def trunc_normal_replaced(make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Iterator[None]:
    """Draw truncated normals of any shape inside the block by what `make` returns of torch's own function."""
    with _replaced(nn.init, "_no_grad_trunc_normal_", make(nn.init._no_grad_trunc_normal_)):
        yield


@contextmanager
def mesh_join_replaced(make: Callable[[Callable[..., DeviceMesh]], Callable[..., DeviceMesh]]) -> Iterator[None]:
    """Join meshes inside the block by what `make` returns of torch's own function."""
    with _replaced(DeviceMesh, "_concatenate", staticmethod(make(DeviceMesh._concatenate))):
        yield


@contextmanager
def _replaced(owner: object, name: str, replacement: object) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def process_groups() -> list[dist.ProcessGroup]:
    """Return all groups that this process is in."""
    return list(distributed_c10d._world.pg_map)


def set_timeout(timeout: timedelta) -> None:
    """Change how long operations of all process groups wait."""
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in process_groups():
        change(timeout, group)


def forget_failed_groups() -> None:
    """Number process groups from 0 again, where there are none.

    One whose making failed counts: the next one would have another name than with other ranks, which would not meet.
    """
    distributed_c10d._world.group_count = 0


DDP_MODE = "ddp_optimizer"
"""What `torch._dynamo` says of how torch.compile treats a DistributedDataParallel, unless it was told otherwise."""

_DYNAMO, _DYNAMO_UTILS = "torch._dynamo", "torch._dynamo.utils"
_MARK = "__dynamo_disable"  # of a function that torch.compile is to leave alone: what torch calls in its place


def spare_dynamo() -> None:
    """Let optimizers and models of this process work without `torch._dynamo`, until something else imports it.

    torch imports it, which takes as long as a third of torch and 40 MB, for torch.compile to leave alone what is called
    here; in a process that compiles nothing there is nothing to be left alone. Where this torch has no such names,
    things are as before.
    """
    if _DYNAMO in sys.modules:
        return
    in_ddp = getattr(DistributedDataParallel, "_inside_ddp_forward", None)
    for function in (*vars(torch.optim.Optimizer).values(), getattr(in_ddp, "__wrapped__", None)):
        if _made_in(function, "_disable_dynamo"):
            _call_as_it_is(function)
    for kind in list(vars(torch.optim).values()):
        step = vars(kind).get("step") if inspect.isclass(kind) else None
        if _made_in(step, "_use_grad_for_differentiable"):
            kind.step = _step_as_it_is(step)


def _made_in(function: Any, decorator: str) -> bool:
    """Whether a function is what one of torch's decorators makes of another."""
    name = getattr(getattr(function, "__code__", None), "co_qualname", "")
    return hasattr(function, "__wrapped__") and name.startswith(f"{decorator}.<locals>.")


def _call_as_it_is(function: Any) -> None:
    """Let a function that torch.compile is to leave alone be called as it is, until there is a torch.compile."""
    plain = function.__wrapped__

    def called(*args: Any, **keywords: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return plain(*args, **keywords)
        if vars(plain).get(_MARK) is called:
            vars(plain).pop(_MARK, None)
        return function(*args, **keywords)  # makes torch's own mark

    called._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it is compiled before it was called
    vars(plain).setdefault(_MARK, called)


def _step_as_it_is(step: Any) -> Callable[..., Any]:
    """Return an optimizer's step that does what torch's does without breaking the graph of a torch.compile."""
    plain = step.__wrapped__

    @functools.wraps(step)
    def stepped(self: torch.optim.Optimizer, *args: Any, **keywords: Any) -> Any:
        if _DYNAMO in sys.modules:
            return step(self, *args, **keywords)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **keywords)

    return stepped


class _Unimported(ModuleType):
    """Stands for a module of which one name is asked, and imports it for any other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def build_ddp(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """Build a DistributedDataParallel, without importing `torch._dynamo` for a setting that is as by default.

    Args:
        settings: its arguments.
    """
    if _DYNAMO in sys.modules or "_dynamo" in vars(torch):
        return DistributedDataParallel(model, **settings)
    dynamo, utils = _Unimported(_DYNAMO), _Unimported(_DYNAMO_UTILS)
    dynamo.utils, utils.get_optimize_ddp_mode = utils, lambda: DDP_MODE  # type: ignore[attr-defined]
    torch._dynamo = dynamo
    try:
        return DistributedDataParallel(model, **settings)
    finally:
        if vars(torch).get("_dynamo") is dynamo:
            del torch._dynamo
