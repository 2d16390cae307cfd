"""A caller's own model and loss are tried on two samples, before anything starts."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from echelon.core.errors import UserError
from echelon.data.images import random_state_kept
from echelon.models.keras_model import KerasModule
from echelon.models.tables import check_tables
from echelon.models.trial import evaluating, own_copy, try_out
from echelon.observe.stacks import user_frame
from echelon.tasks import nest
from echelon.tasks.base import EvaluationResult, Task
from echelon.tasks.nest import Nest
from echelon.tasks.tailored import TailoredTask
from echelon.trainer.inputs import model_input
from echelon.trainer.work import Work

_NEEDS_SEVERAL = "Expected more than 1 value per channel"  # as torch says it
_SAID = 300  # characters of what a forward raises
_SAME = 1e-4  # relative difference of a mean, computed in two ways


def check_own_model(model: nn.Module, work: Work) -> None:
    """Refuse a model from Python that the first step, or the first evaluation, could not use.

    It is called with two samples of the data as it evaluates and as it trains, and then a loss of the caller's own.
    Where no samples are at hand, as in a rehearsal, zeros stand for them, and what forward raises then says nothing.

    Raises:
        UserError: data and parameters are of different types, gradients would be sparse where they cannot be, forward
            raises, or outputs are not what the task learns from.
    """
    _check_types(model, work)
    label = f"model {type(model).__name__}"
    check_tables(model, label)
    if work.example_targets is not None:
        _Trial(label, work).run(model)
        return
    try:
        try_out(model, label, model_input(work.info, work.task))
    except UserError:
        raise
    except Exception:  # noqa: BLE001  the caller's code may raise any, of zeros
        return


def make_whole(model: nn.Module, work: Work) -> None:
    """Give lazy layers of a model from Python their sizes, as a call with two samples does: alike on each rank.

    Raises:
        UserError: forward raises; or parameters have sizes but no values.
    """
    label = f"model {type(model).__name__}"
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(is_lazy(tensor) for _, tensor in tensors):
        with evaluating(model), torch.no_grad():
            _Trial(label, work).outputs(model, work.inputs(torch.empty(0)), torch.empty(0), "")
    elif empty := next((name for name, tensor in tensors if tensor.is_meta), ""):
        raise UserError(
            f"{label}: {empty} is on the meta device and has no values: build the model outside of "
            "torch.device('meta'), or give it values after model.to_empty(device='cpu')"
        )


def check_single_samples(model: nn.Module, work: Work) -> None:
    """Refuse a batch of which a rank has one sample alone, where normalisation needs several values.

    Where equal parts have more, and parts follow the ranks' speed, it is noted instead: none gets one sample alone.

    Raises:
        UserError: says how to leave it out.
    """
    if not (work.least_samples == 1 or work.balances) or isinstance(model, KerasModule):
        return
    example = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    single = nest.take(work.inputs(example), [0])
    try:
        copied = own_copy(model, {name for name, _ in model.named_parameters(remove_duplicate=False)}).train()
        on_gpu = [example.device] if example.is_cuda else []
        with random_state_kept(), torch.random.fork_rng(devices=on_gpu), torch.no_grad():
            nest.call(copied, single)
    except ValueError as error:
        if _NEEDS_SEVERAL not in str(error):
            return
        if work.least_samples > 1:
            work.needs_several.append(True)
            return
        raise UserError(
            f"model {type(model).__name__} normalises over the samples of a batch, and a worker has one alone in "
            f"{_where_alone(work)}, or GroupNorm"
        ) from error
    except Exception:  # noqa: BLE001  what else a forward raises is told where samples are at hand
        return


def _where_alone(work: Work) -> str:
    """Say in which batches a worker has one sample alone, and what leaves it more."""
    if work.usual_samples == 1:
        return "every batch: use a larger --batch-size, fewer workers, or less --accumulate"
    samples = f"{work.info.train_size:,} training samples"
    return f"the last batch of an epoch ({samples}): use a --batch-size that leaves more"


def _check_types(model: nn.Module, work: Work) -> None:
    inputs = {leaf.dtype for leaf in nest.leaves(work.info.inputs)}
    held = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if "float64" in inputs and held and torch.float64 not in held:
        raise UserError(
            f"data {work.info.name}: inputs are float64 and the parameters of {type(model).__name__} are "
            f"{str(next(iter(held))).removeprefix('torch.')}: give float32 inputs (tensor.float()), or model.double()"
        )


class _Trial:
    """Two samples, and what a model makes of them."""

    def __init__(self, label: str, work: Work) -> None:
        self._label, self._work = label, work

    def run(self, model: nn.Module) -> None:
        """Call it as it evaluates, then as it trains.

        Raises:
            UserError: forward raises, or its outputs are not what the task learns from.
        """
        try:
            model = own_copy(model, {name for name, _ in model.named_parameters(remove_duplicate=False)})
        except UserError:  # nor can it be tried as it trains: its statistics would move
            with evaluating(model), torch.no_grad():
                self._try(model, "")
            return
        with evaluating(model), torch.no_grad():
            self._try(model, "")
        model.train()
        with torch.enable_grad():  # some use gradients in their forward
            self._try(model, " in training mode")

    def _try(self, model: nn.Module, mode: str) -> None:
        example = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        given = self._work.inputs(example) if self._work.example is None else self._work.example
        inputs, targets = (nest.to_device(each, example.device) for each in (given, self._work.example_targets))
        outputs = self.outputs(model, inputs, example, mode)
        if wrong := self._work.task.wrong_outputs(outputs, nest.rows(targets)):
            raise UserError(f"{self._label} {wrong}{mode}")
        exact = nest.exact(outputs)
        if wrong := self._work.task.wrong_loss(exact, targets):
            raise UserError(f"{wrong}{mode}")
        if not mode and (odd := self._work.task.odd_outputs(exact)):
            self._work.oddities.append(f"{self._label}: {odd}")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
            self._check_gradient(exact, targets)
        elif self._work.task.is_own and (wrong := _wrong_task(self._work.task, exact, targets, example.device)):
            raise UserError(f"task {self._work.task.name}: {wrong}{mode}")
        if not mode and self._work.task.is_own and returns_mean(self._work.task, exact, targets):
            raise UserError(
                f"task {self._work.task.name}: its loss_sum returns the mean over a batch, and each step would divide "
                "it once more: return the sum over the batch (reduction='sum')"
            )

    def _check_gradient(self, outputs: Any, targets: Nest) -> None:
        """Refuse a loss that no parameter moves, as of outputs without a gradient."""
        try:
            loss = self._work.task.loss_sum(outputs, targets)
        except Exception:  # noqa: BLE001  a task of the caller's own may need more samples than two
            return
        if not loss.requires_grad:
            raise UserError(
                f"{self._label}: the loss has no gradient: something between the parameters and it is cut off, by "
                "detach(), item(), argmax, or torch.no_grad()"
            )

    def outputs(self, model: nn.Module, inputs: Nest, example: Tensor, mode: str) -> Any:
        """Call a model.

        Args:
            inputs: of two samples.
            example: of any shape, on the device of the model.
            mode: that it is in, for words; empty: it evaluates.

        Raises:
            UserError: forward raises.
        """
        devices = [example.device] if example.is_cuda else []
        try:
            with random_state_kept(), torch.random.fork_rng(devices=devices):
                return nest.call(model, inputs)
        except UserError:
            raise
        except Exception as error:  # the caller's code may raise any
            said = " ".join(str(error).split())[:_SAID]
            raise UserError(
                f"{self._label} cannot be called with samples of data {self._work.info.name}, "
                f"{nest.describe(self._work.info.inputs)}{mode}: {type(error).__name__}: {said}{_place(error)}"
            ) from error


def _wrong_task(task: Task, outputs: Any, targets: Nest, device: torch.device) -> str:
    """Say what a task of the caller's own gives that nothing can be made of; empty: nothing wrong was seen.

    What its loss raises says nothing, nor what its metrics make of two samples: they may need more.
    """
    try:
        loss = task.loss_sum(outputs, targets)
    except Exception:  # noqa: BLE001
        loss = torch.zeros(())
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        return f"loss_sum must return one number as a tensor, the sum over the samples, and returned {got}"
    metrics = task.metrics(device)
    if not (hasattr(metrics, "update") and hasattr(metrics, "compute")):
        return f"metrics must return an object with update and compute, and returned {type(metrics).__name__}"
    try:
        metrics.update(outputs, targets)
    except Exception as error:  # noqa: BLE001
        said = " ".join(str(error).split())[:_SAID]
        hint = "; with task=supervised only metrics of your own count" if isinstance(task, TailoredTask) else ""
        shapes = f"{_shapes(outputs)}, and targets {_shapes(targets)}"
        return f"its metrics cannot take outputs {shapes}: {type(error).__name__}: {said}{_place(error)}{hint}"
    try:
        found = metrics.compute()
    except UserError as error:  # of a metric that is no number: more samples do not mend that
        return str(error)
    except Exception:  # noqa: BLE001
        return ""
    if not isinstance(found, EvaluationResult):
        return f"compute of its metrics must return an EvaluationResult, and returned {type(found).__name__}"
    if task.primary.name not in (*found.metrics, "loss") and not task.generation_samples:
        known = ", ".join(sorted(found.metrics)) or "none"
        return f"its primary metric is {task.primary.name!r}, and its metrics give {known}: name one of them, or loss"
    return ""


def _shapes(values: Nest) -> str:
    return ", ".join(str(tuple(leaf.shape)) for leaf in nest.leaves(values))


def returns_mean(task: Task, outputs: Any, targets: Nest) -> bool:
    """Whether a task's loss of two samples is the mean of what it gives for each alone, by units, and not their sum.

    A copy of the task is asked. What depends on other samples of a batch, draws random numbers, raises for one sample,
    or is 0, does not tell.

    Args:
        outputs: `(2, ...)`, of a model that evaluates.
        targets: `(2, ...)`.
    """
    try:
        task = copy.deepcopy(task)

        def loss(chosen: slice) -> float:
            """Return what the task gives for some of the samples."""
            with torch.no_grad():
                return float(task.loss_sum(nest.take(outputs, chosen), nest.take(targets, chosen)))

        with random_state_kept(), torch.random.fork_rng(devices=[]):
            both, again, first, second = (loss(slice(*ends)) for ends in ((0, 2), (0, 2), (0, 1), (1, 2)))
        units = [task.units(nest.take(targets, slice(i, i + 1))) for i in range(2)]
    except Exception:  # noqa: BLE001  the caller's code may raise any
        return False
    mean = (first * units[0] + second * units[1]) / max(1, sum(units))
    return both == again != 0 and math.isclose(both, mean, rel_tol=_SAME)


def _place(error: Exception) -> str:
    """Say where the caller's code raised, or called what did."""
    frame = user_frame(error)
    return f" ({frame.file}:{frame.line})" if frame is not None else ""
