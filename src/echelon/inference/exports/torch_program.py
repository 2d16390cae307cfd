"""`.pt2`: the computation itself, with its weights, as `torch.export` writes it; the batch may be of any size."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from echelon.core.errors import UserError
from echelon.inference.exports.base import ExportFormat, Predictor, cannot_be_traced, description
from echelon.run.trained import TrainedModel
from echelon.tasks import nest
from echelon.tasks.nest import Nest, TensorSpec


class TorchProgram(ExportFormat):
    """A program of `torch.export`."""

    def write(self, trained: TrainedModel, path: Path, example: Nest) -> None:
        """Trace the model and write the program, with a description beside it."""
        program = traced(trained, path, example)
        with quiet():
            torch.export.save(program, path, extra_files=description(trained))

    def read(self, trained: TrainedModel, path: Path) -> Predictor:
        """Return the program that was written."""
        module = torch.export.load(path).module()
        return lambda inputs: nest.call(module, inputs)


def traced(trained: TrainedModel, path: Path, example: Nest) -> ExportedProgram:
    """Return a model's computation for batches of any size, and samples of any length where they differ in it.

    Raises:
        UserError: it depends on the values of its inputs, or on the size of a batch.
    """
    args, kwargs = positional(example)
    dynamic = any_size(trained.info.inputs)
    shapes = dynamic if isinstance(dynamic, dict) and kwargs else positional(dynamic)[0]
    if args and _takes_any(trained.model):
        shapes = (shapes,)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(trained.model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise cannot_be_traced(path, error) from error


def _takes_any(model: nn.Module) -> bool:
    """Whether all inputs by position are one argument of `forward`, as of models of Keras."""
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    return first is not None and first.kind is inspect.Parameter.VAR_POSITIONAL


def positional(inputs: Nest) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as a model is called with them: by position, and by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


class AnySize(dict[int, Any]):
    """The axes of a tensor whose size may be any, by their number: a leaf of a nest."""


def any_size(specs: Nest) -> Nest:
    """Return the axes of each input that differ between batches: samples, and the length of ragged ones."""
    batch = Dim("batch", min=1)

    def axes(spec: TensorSpec) -> dict[int, Any]:
        """Return the axes of one tensor."""
        return {0: batch, 1: Dim.AUTO} if spec.ragged else {0: batch}

    if isinstance(specs, Mapping):
        return {name: axes(spec) for name, spec in specs.items()}
    return tuple(axes(spec) for spec in specs) if isinstance(specs, (tuple, list)) else (axes(specs),)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and logs of tracing from the user, who is told what came of it."""
    import logging

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def as_named(inputs: Nest, names: list[str]) -> dict[str, Tensor]:
    """Return the tensors of inputs by the names that a program has for them.

    Raises:
        UserError: it has others.
    """
    if isinstance(inputs, Mapping):
        return {name: inputs[name] for name in names}
    leaves = nest.leaves(inputs)
    if len(leaves) != len(names):
        raise UserError(f"the program takes {', '.join(names)}, the data has {len(leaves)} inputs")
    return dict(zip(names, leaves, strict=True))
