"""A caller's own model and loss are tried on two samples, before anything starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.data.images import random_state_kept
from echelon.models.keras_model import KerasModule
from echelon.models.tables import check_tables
from echelon.models.trial import evaluating, own_copy, try_out
from echelon.observe.stacks import user_frame
from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.trainer.inputs import model_input
from echelon.trainer.work import Work

_NEEDS_SEVERAL = "Expected more than 1 value per channel"  # as torch says it
_SAID = 300  # characters of what a forward raises


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


def check_single_samples(model: nn.Module, work: Work) -> None:
    """Refuse a batch of which a rank has one sample alone, where normalisation needs several values.

    Raises:
        UserError: says how to leave it out.
    """
    if work.least_samples != 1 or isinstance(model, KerasModule):
        return
    example = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    single = nest.take(work.inputs(example), [0])
    try:
        copied = own_copy(model, {name for name, _ in model.named_parameters(remove_duplicate=False)}).train()
        with random_state_kept(), torch.random.fork_rng(devices=[]), torch.no_grad():
            nest.call(copied, single)
    except ValueError as error:
        if _NEEDS_SEVERAL not in str(error):
            return
        raise UserError(
            f"model {type(model).__name__} normalises over the samples of a batch, and a worker has one alone in the "
            f"last batch of an epoch ({work.info.train_size:,} training samples): use a --batch-size that leaves more, "
            "or GroupNorm"
        ) from error
    except Exception:  # noqa: BLE001  what else a forward raises is told where samples are at hand
        return


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
        outputs = self._outputs(model, inputs, example, mode)
        if wrong := self._work.task.wrong_outputs(outputs, nest.rows(targets)):
            raise UserError(f"{self._label} {wrong}{mode}")
        if wrong := self._work.task.wrong_loss(nest.exact(outputs), targets):
            raise UserError(f"{wrong}{mode}")

    def _outputs(self, model: nn.Module, inputs: Nest, example: Tensor, mode: str) -> Any:
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


def _place(error: Exception) -> str:
    """Say where the caller's code raised, or called what did."""
    frame = user_frame(error)
    return f" ({frame.file}:{frame.line})" if frame is not None else ""
