"""What a run will be, told before torch is imported: by names, folders, and what files declare of themselves."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import ModelConfig, RunConfig
from echelon.core.hints import name_for_side
from echelon.core.model_names import BUILTIN_FOLDER
from echelon.records.events import StartedOver
from echelon.records.file import newest
from echelon.records.kinds import Checkpoint, Start
from echelon.run.data_names import declared_kinds, holds_folders_of_a_kind, kind_by_name
from echelon.tasks.registry import AUTO, TASKS

if TYPE_CHECKING:
    from torch import nn

_COUNT = "COUNT"  # of parameters, in a built-in model's file
_PEEKED = 32
_EVERYTHING = "all"  # is trained


@dataclass(frozen=True)
class Foretold:
    """What is known of a run's model at once.

    Attributes:
        model: what `auto` becomes; as described where only the opened data tells.
        parameters: that are trained; None: known once the model is built.
        done_steps: of a run that is continued: the step of its last checkpoint.
        objects: keywords of `echelon.resume` by which it needs objects from Python again.
    """

    model: str
    parameters: int | None = None
    done_steps: int = 0
    objects: Sequence[str] = ()


@dataclass(frozen=True)
class _ImageShape:
    """Images as a model of classes takes them; 0 channels or classes are not known.

    Attributes:
        sides: in pixels, of those that were looked at.
    """

    channels: int
    sides: frozenset[int]
    classes: int


def foretell(config: RunConfig) -> Foretold:
    """Return what a description's names, and the folders that they lead to, tell of its model."""
    model, of_classes = config.model, config.task in (AUTO, "image-classification")
    shape = _shape(config) if of_classes and not config.optimizer.loss else None
    if shape is None:
        return Foretold(model.name)
    names = {name_for_side(side) for side in shape.sides}
    name = names.pop() if model.name == AUTO and config.task == AUTO and len(names) == 1 else model.name
    return Foretold(name, _parameters(name, shape) if trains_all(model) else None)


def auto_in_words(config: RunConfig) -> str:
    """Return the model of a run whose data tells more, as far as names tell: it, or what `auto` will be one of."""
    model, kind = config.model.name, kind_by_name(config.data.source)
    if model != AUTO or config.optimizer.loss or ":" in config.task:
        return model
    tasks = [config.task.replace("-", "_")] if config.task != AUTO else kind.tasks if kind else ()
    by_columns = kind is not None and len(kind.tasks) > 1
    models = list(dict.fromkeys(_model_of(task, by_columns) for task in tasks))
    if len(models) == 1 and models[0]:
        return models[0]
    rest = [] if models and "" not in models else ["the one of the task that the data is for"]
    *others, last = [*filter(None, models), *rest]
    return f"{AUTO} ({', '.join(others)}{' or ' if others else ''}{last})"


def _model_of(task: str, by_columns: bool) -> str:
    """Return what `auto` becomes by a task's file; empty: more than the task decides."""
    declared = TASKS.declaration(task).constants
    named = [ast.literal_eval(declared[name]) for name in ("default_model", *(["table_model"] if by_columns else []))]
    return next(filter(None, map(str, named)), "")


def trains_all(model: ModelConfig) -> bool:
    """Whether a model is trained as it is built."""
    return model.tune == _EVERYTHING and not model.weights


def trained_scalars(module: nn.Module | None) -> int | None:
    """Return the trainable scalars of a caller's module; None: there is none, or its first batch tells their shapes."""
    from torch.nn.parameter import is_lazy

    parameters = [each for each in module.parameters() if each.requires_grad] if module is not None else []
    return None if any(map(is_lazy, parameters)) else sum(each.numel() for each in parameters) or None


def told_by_record(path: Path, config: RunConfig) -> Foretold:
    """Return what the record of a run that is continued says of its model."""
    begun, last = next(newest(path, Start), None), next(newest(path, Checkpoint, StartedOver), None)
    done = last.step if isinstance(last, Checkpoint) else 0
    told = Foretold(begun.model or config.model.name, begun.parameters) if begun else foretell(config)
    return replace(told, done_steps=done, objects=begun.objects if begun else ())


def _shape(config: RunConfig) -> _ImageShape | None:
    """Return what images will be; None: only opening tells, or the data is none of images with a class each."""
    source, side = config.data.source, config.data.image_size
    declared: dict[str, Sequence[int]] = {}
    for kind in declared_kinds():
        declared |= kind.shapes
    if source in declared:
        channels, own_side, classes = declared[source]
        return _ImageShape(channels, frozenset({side or own_side}), classes)
    path = Path(source).expanduser()
    if path.is_dir() and not holds_folders_of_a_kind(path):
        return _of_folder(path / "train" if (path / "train").is_dir() else path, side)
    return _ImageShape(0, frozenset({side}), 0) if side else None


def _of_folder(path: Path, side: int) -> _ImageShape | None:
    """Return the shape of a folder's images, by a few of them; None: they cannot be read."""
    try:
        classes = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
        sides = [side] if side else _sides(_spread(classes, _PEEKED))
    except OSError:
        return None  # whoever opens the folder says why
    return _ImageShape(3, frozenset(sides), len(classes)) if sides else None


def _sides(classes: Sequence[Path]) -> list[int]:
    """Return the smaller sides of a few images of each class."""
    from PIL import Image, UnidentifiedImageError

    sides = []
    for folder in classes:
        names = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
        for file in _spread(names, max(1, _PEEKED // len(classes))):
            try:
                with Image.open(file) as picture:
                    sides.append(min(picture.size))
            except (UnidentifiedImageError, Image.DecompressionBombError, IsADirectoryError):
                continue  # whoever reads it says so
    return sides


def _spread(items: Sequence[Path], count: int) -> list[Path]:
    """Return at most so many items, evenly spaced."""
    return [items[i * len(items) // min(count, len(items))] for i in range(min(count, len(items)))]


def _parameters(model: str, shape: _ImageShape) -> int | None:
    """Return the trainable scalars of a built-in model whose file says how many it has."""
    formula = declared_count(model)
    if not formula or not (shape.channels and shape.classes):
        return None
    known = {"channels": shape.channels, "classes": shape.classes}
    counts = {evaluate(formula, {**known, "side": side}) for side in shape.sides}
    return counts.pop() if len(counts) == 1 else None


def declared_count(model: str) -> str:
    """Return the formula of a built-in model's file for its parameters; empty: it has none. Imports nothing."""
    file = BUILTIN_FOLDER / f"{model}.py"
    if not model.isidentifier() or not file.is_file():
        return ""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _COUNT:
            return str(ast.literal_eval(node.value))
    return ""


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Mult: operator.mul, ast.Pow: operator.pow,
}  # fmt: skip


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """Return the value of a formula of whole numbers, names, `+`, `*` and `**`.

    >>> evaluate("288 * channels + 513 * classes + 92608", {"channels": 1, "classes": 10})
    98026
    """

    def value(node: ast.expr) -> int:
        """Return the value of a part of it."""
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.Name(id=name):
                return values[name]
            case ast.Constant(value=int() as number):
                return number
        raise ValueError(f"{ast.unparse(node)} is no part of a formula of parameters")

    return value(ast.parse(formula, mode="eval").body)
