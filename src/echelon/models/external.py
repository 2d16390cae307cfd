"""Models from timm, torchvision and a user's own module; libraries are imported when first asked for."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from echelon.core.errors import UserError
from echelon.core.model_names import unknown_of_library
from echelon.core.own import find_own
from echelon.models.base import ModelInput
from echelon.models.keras_model import is_keras_model, keras_module

WITHOUT_AUXILIARY_HEADS = ("googlenet", "inception_v3")
"""Models of torchvision whose auxiliary heads are left out."""


def build_timm(name: str, data: ModelInput) -> nn.Module:
    """Build `timm/NAME` without pretrained weights, its classifier, first layer and, where fixed, image size from data.

    Raises:
        UserError: timm has no such model, or it cannot be built for such images.
    """
    import timm
    from timm.models import get_pretrained_cfg

    if not timm.is_model(name):
        raise unknown_of_library("timm", name, timm.list_models())
    size: dict[str, int] = {}
    pretrained = get_pretrained_cfg(name, allow_unregistered=True)
    if pretrained is not None and pretrained.fixed_input_size:
        size["img_size"] = data.image_size
    try:
        return timm.create_model(name, pretrained=False, num_classes=data.classes, in_chans=data.channels, **size)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise _not_for_such_images(f"timm/{name}", data, error) from error


def build_torchvision(name: str, data: ModelInput) -> nn.Module:
    """Build `torchvision/NAME` without pretrained weights, one of classification or of segmentation.

    Raises:
        UserError: torchvision has no such model, or the images do not have 3 channels.
    """
    from torchvision import models

    known = _torchvision_names()
    if name not in known:
        raise unknown_of_library("torchvision", name, known)
    if data.channels != 3:
        raise UserError(
            f"--model torchvision/{name} takes 3-channel images, the data has {data.channels}: "
            "use a timm/ or built-in model, which adapt"
        )
    options: dict[str, int | bool | None] = {"num_classes": data.classes}
    if name.startswith(("fcn_", "deeplabv3_", "lraspp_")):
        # The auxiliary head, which they are trained with, gives its logits beside the others'.
        options |= {"weights_backbone": None} | ({} if name.startswith("lraspp_") else {"aux_loss": True})
    if name.startswith("vit_"):
        options["image_size"] = data.image_size
    if name in WITHOUT_AUXILIARY_HEADS:
        # Their auxiliary classifiers return a tuple while training, which no other model does.
        options |= {"aux_logits": False, "init_weights": True}
    try:
        return models.get_model(name, weights=None, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise _not_for_such_images(f"torchvision/{name}", data, error) from error


def build_own(name: str, data: ModelInput) -> nn.Module:
    """Call `module:function` with `data: ModelInput`, or with those of classes, channels, image_size that it takes.

    The current folder is searched too, as `python -m` does.

    Raises:
        UserError: there is no such module or function, it takes something else, or returns no `nn.Module`.
    """
    function = _find_own(name)
    if isinstance(function, nn.Module) or is_keras_model(function):
        raise UserError(f"--model {name} is a module: name a function or class that builds one for the data")
    if not callable(function):
        raise UserError(f"--model {name} is a {type(function).__name__}: name a function that returns a model")
    model = function(**_arguments(name, function, data))
    if is_keras_model(model):
        return keras_module(model, f"--model {name}")
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {name} must return a torch.nn.Module; it returned {type(model).__name__}")
    return model


def _find_own(name: str) -> Any:
    """Return what `module:function` names.

    Raises:
        UserError: there is none, or importing it needs a backend of Keras that is not installed.
    """
    try:
        return find_own("--model", name)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "jax") or "keras" not in sys.modules:
            raise
        raise UserError(
            f"--model {name}: keras wants its {error.name} backend: set KERAS_BACKEND=torch before keras is imported"
        ) from error


def library_names() -> dict[str, list[str]]:
    """Return every model name of timm and of torchvision."""
    import timm

    return {"timm": timm.list_models(), "torchvision": _torchvision_names()}


def _torchvision_names() -> list[str]:
    """Return its models of classification and of segmentation."""
    from torchvision import models

    names: list[str] = models.list_models(module=models) + models.list_models(module=models.segmentation)
    return names


def _arguments(name: str, function: Callable[..., Any], data: ModelInput) -> dict[str, object]:
    sizes = {"classes": data.classes, "channels": data.channels, "image_size": data.image_size}
    offered = {"data": data, **sizes}
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    taken = {p.name: offered[p.name] for p in named if p.name in offered and p.kind is not p.POSITIONAL_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken |= sizes
    missing = [p.name for p in named if p.default is p.empty and p.name not in taken]
    if missing:
        raise UserError(
            f"--model {name} needs {', '.join(missing)}, which is not known here: "
            f"give it a default, or take some of {', '.join(offered)}"
        )
    return taken


def _not_for_such_images(name: str, data: ModelInput, error: Exception) -> UserError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(
        f"--model {name} cannot be built for {data.describe()} ({reason}): choose another model or --image-size"
    )
