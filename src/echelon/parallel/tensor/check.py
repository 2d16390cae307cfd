"""A tensor plan that nobody declared is tried: the split model has to answer, and to learn, as the whole one did.

What each module gives of the whole model is noted, so that a wrong plan is refused by the module that it is wrong at;
of gradients sketches are kept, for those of a whole model may not fit beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.core.errors import UserError
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import FAKE_TENSOR_LOGGER, backward_in_evaluation, detect_fake_mode

# Sums over ranks are made in another order: some ulps of a network's depth; a wrong split is off by the whole.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
OTHER_TOLERANCE = 0.1
# Of a layer's gradient: a ReLU whose input is about zero may turn, which in float32 is 0.4% of a ResNet-50's.
GRADIENT_TOLERANCE = {torch.float64: 1e-7, torch.float32: 3e-2}
OTHER_GRADIENT_TOLERANCE = 0.3
SKETCH = 8


@dataclass(frozen=True)
class Output:
    """What is noted of a module's first output: its shape, and two sums over it, without waiting for a GPU."""

    shape: tuple[int, ...]
    sums: Tensor

    @classmethod
    def of(cls, output: Any) -> Output | None:
        """Return what is noted of an output; None: it has no real numbers."""
        tensor = next((leaf for leaf in nest.leaves(output) if isinstance(leaf, Tensor)), None)
        if tensor is None or not tensor.is_floating_point():
            return None
        wide = tensor.detach().double()
        return cls(tuple(tensor.shape), torch.stack([wide.sum(), wide.abs().sum()]))

    def is_like(self, other: Output, tolerance: float) -> bool:
        """Whether another output of this shape has these sums, relative to that of the absolute values."""
        return not bool((self.sums - other.sums).abs().max() > tolerance * self.sums[1].clamp(min=1e-6))


@dataclass(frozen=True)
class Answer:
    """What a model gives for an example.

    Attributes:
        logits: its first output, `(B, ...)`.
        outputs: of its modules by name, in the order in which they came.
        gradients: sketches of the trainable parameters' gradients, by name in the order of backward; empty where the
            output has none, as a pipeline's.
        gradients_fit: False: memory did not suffice for gradients.
    """

    logits: Tensor
    outputs: Mapping[str, Output]
    gradients: Mapping[str, Tensor]
    gradients_fit: bool = True


@dataclass
class _Trail:
    running: list[str] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)

    def begin(self, name: str, module: nn.Module, args: Any) -> None:
        self.running.append(name)

    def end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        noted = Output.of(output)
        if noted is not None:
            self.outputs.setdefault(name, noted)


@contextmanager
def _followed(model: nn.Module) -> Iterator[_Trail]:
    """Note inside the block which modules are called, and what they give."""
    trail = _Trail()
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(trail.begin, name), prepend=True))
        handles.append(module.register_forward_hook(partial(trail.end, name)))
    try:
        yield trail
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def answer(model: nn.Module, example: Nest) -> Answer:
    """Return what the model gives for an example, in evaluation mode; without gradients where these take more memory
    than there is.
    """
    try:
        with _followed(model) as trail:
            return _answer(model, example, trail, with_gradients=True)
    except torch.OutOfMemoryError:
        model.zero_grad()
    with _followed(model) as trail:  # not in the handler, which has the memory of what failed
        return _answer(model, example, trail, with_gradients=False)


def _answer(model: nn.Module, example: Nest, trail: _Trail, with_gradients: bool) -> Answer:
    was_training = model.training
    model.eval()
    try:
        with torch.set_grad_enabled(with_gradients), backward_in_evaluation([model]):
            result = nest.call(model, example)
            logits = getattr(result, "logits", None)
            if not isinstance(logits, Tensor):
                logits = next(leaf for leaf in nest.leaves(result) if isinstance(leaf, Tensor))
            return Answer(logits.detach(), trail.outputs, _gradients(model, logits), with_gradients)
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


def same_function(model: nn.Module, example: Nest, before: Answer) -> tuple[str, ...]:
    """Check that the split model answers an example as it did `before` it was split, and that gradients are the same.

    Use it where the plan was found or written by the user; the example should be random, not blank. All ranks of the
    split call it together.

    Returns:
        what a user has to know, in sentences.

    Raises:
        UserError: it fails, or answers otherwise; names the first module that does.
    """
    advice = (
        "write --tensor-plan by hand, or change yours: layers that follow each other are column and then row, or both "
        "replicate (a fused qkv ordered by head is column, by q, k, v column(parts=3))"
    )
    gradients_fit = _fit_everywhere(model, before)
    with _followed(model) as trail:
        try:
            with _quiet(FAKE_TENSOR_LOGGER):  # it logs a traceback of what is refused in words here
                after = _answer(model, example, trail, gradients_fit)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = f"{str(error).splitlines()[0]}{_where(model, trail)}"
            raise UserError(f"tp: the split model cannot compute one batch ({reason}): {advice}") from error
    if detect_fake_mode((before.logits, after.logits)) is not None:  # a rehearsal: there are no values
        return ()
    tolerance = TOLERANCE.get(before.logits.dtype, OTHER_TOLERANCE)
    scale, same_shape = before.logits.abs().max().clamp(min=1e-6), after.logits.shape == before.logits.shape
    difference = float((after.logits - before.logits).abs().max() / scale) if same_shape else float("inf")
    if not difference <= tolerance:
        reason = f"logits differ by {difference:.1e} of the largest{_first_wrong(model, before, after, tolerance)}"
        raise UserError(f"tp: the split model is not the same function ({reason}): {advice}")
    if after.gradients:
        _check_gradients(model, before, after)
    if gradients_fit:
        return ()
    return ("tp: the split model's outputs are the model's; its gradients were not compared, for memory ran out",)


def _fit_everywhere(model: nn.Module, before: Answer) -> bool:
    """Whether the whole model's gradients fitted into the memory of every rank of the split; True in a rehearsal."""
    if detect_fake_mode((before.logits,)) is not None:
        return True
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    fits = torch.tensor(int(before.gradients_fit), device=before.logits.device)
    if mesh is not None:
        dist.all_reduce(fits, dist.ReduceOp.MIN, group=mesh.get_group())
    return bool(fits)


def _where(model: nn.Module, trail: _Trail) -> str:
    """Say in which module a forward pass failed."""
    name = trail.running[-1] if trail.running else ""
    return f": in the forward pass of {name}, a {_kind(model, name)}" if name else ""


def _first_wrong(model: nn.Module, before: Answer, after: Answer, tolerance: float) -> str:
    """Say which module is the first to give a whole output that is wrong; a part of one has another shape."""
    for name, output in after.outputs.items():
        expected = before.outputs.get(name)
        if name and expected is not None and expected.shape == output.shape and not expected.is_like(output, tolerance):
            return f", the first wrong output is that of {name}, a {_kind(model, name)}"
    return ""


def _kind(model: nn.Module, name: str) -> str:
    """Return the class of a module, before its parameters were split."""
    kind = type(model.get_submodule(name))
    return kind.__name__.removeprefix("Local") if kind.__name__.startswith("Local") else kind.__name__


def _check_gradients(model: nn.Module, before: Answer, after: Answer) -> None:
    """Refuse a split model with other gradients, on any rank; backward was right up to the layer that is named."""
    tolerance = GRADIENT_TOLERANCE.get(before.logits.dtype, OTHER_GRADIENT_TOLERANCE)
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
