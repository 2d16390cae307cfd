"""From a model's name to a module that fits the data."""

from __future__ import annotations

import importlib
import pkgutil

from torch import nn

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.core.hints import Hints, name_for_side
from echelon.core.model_names import OF_COLUMNS, OF_PIXELS, OF_SEQUENCES, of_images, unknown_model
from echelon.core.own import TRANSFORMERS
from echelon.models import builtin
from echelon.models.base import ModelInput
from echelon.models.external import build_own, build_timm, build_torchvision, library_names
from echelon.models.logits import give_logits, keep_no_cache
from echelon.models.of_transformers import build_transformers, fill_padding
from echelon.models.trial import try_out


def build_model(config: ModelConfig, data: ModelInput) -> nn.Module:
    """Build `config.name` for the data, with values as initialised.

    Every model is tried once on two blank inputs, so that one that cannot take them is refused before anything starts.

    Raises:
        UserError: the name is unknown (with the nearest one), the model cannot take such inputs, or does not give
            one logit per class.
    """
    name = auto_name(data) if config.name == "auto" else config.name
    model = build_untried(config, data)
    _try_out(model, name, data)
    return model


def build_untried(config: ModelConfig, data: ModelInput) -> nn.Module:
    """Build `config.name` for the data, without a forward pass: on the meta device, values may matter to that.

    Raises:
        UserError: the name is unknown, or such data do not fit the model.
    """
    return _build(auto_name(data) if config.name == "auto" else config.name, data)


def auto_name(data: ModelInput) -> str:
    """Choose a model: the task's; else by image size: mlp below 8 pixels, small_cnn below 32, resnet20 up to 64, then
    timm/resnet50.
    """
    return data.auto or name_for_side(data.image_size)


def builtin_names() -> list[str]:
    """Return the built-in models of images of one class each: names of files in `models/builtin`. Imports none."""
    return of_images(module.name for module in pkgutil.iter_modules(builtin.__path__))


def parameter_count(model: nn.Module) -> int:
    """Return the number of trainable scalars."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def is_chain_by_name(name: str) -> bool | None:
    """Whether the forward pass of a built-in model is a chain, as its class declares; None: only a built one tells."""
    if name not in (*builtin_names(), *OF_SEQUENCES, *OF_COLUMNS, *OF_PIXELS):
        return None
    module = importlib.import_module(f"{builtin.__name__}.{name}")
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    declared = [found for kind in classes if isinstance(found := getattr(kind, "structure", None), Hints)]
    return any(hints.chain is not None for hints in declared) if declared else None


def _build(name: str, data: ModelInput) -> nn.Module:
    if name.startswith("timm/"):
        return build_timm(name.removeprefix("timm/"), data)
    if name.startswith("torchvision/"):
        return build_torchvision(name.removeprefix("torchvision/"), data)
    if name.startswith(TRANSFORMERS) or ":" in name:
        of_library = name.startswith(TRANSFORMERS)
        model = build_transformers(name.removeprefix(TRANSFORMERS), data) if of_library else build_own(name, data)
        (keep_no_cache if data.takes_records else give_logits)(model)
        fill_padding(model)
        return model
    if name in builtin_names() or name in OF_SEQUENCES + OF_COLUMNS + OF_PIXELS:
        return importlib.import_module(f"{builtin.__name__}.{name}").build(data)
    raise unknown_model(name, builtin_names(), library_names)


def leads_to_model(name: str) -> bool:
    """Whether a name is one of models, by its form; the class of a module that was given from Python is none."""
    known = [*builtin_names(), *OF_SEQUENCES, *OF_COLUMNS, *OF_PIXELS, "auto"]
    return name in known or ":" in name or "/" in name


def _try_out(model: nn.Module, name: str, data: ModelInput) -> None:
    try:
        try_out(model, f"--model {name}", data)
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--model {name} cannot take {data.describe()} ({reason}): choose another model"
            f"{' or --image-size' if data.is_image else ''}"
        ) from error
