"""Models from timm, torchvision, transformers and a user's own module; libraries are imported when first asked for."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.model_names import unknown_of_library
from echelon.core.own import find_own
from echelon.models.base import ModelInput
from echelon.models.keras_model import is_keras_model, keras_module
from echelon.tasks.nest import TensorSpec


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
    if name in {"googlenet", "inception_v3"}:
        # Their auxiliary classifiers return a tuple while training, which no other model does.
        options |= {"aux_logits": False, "init_weights": True}
    try:
        return models.get_model(name, weights=None, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise _not_for_such_images(f"torchvision/{name}", data, error) from error


def build_transformers(folder: str, data: ModelInput) -> nn.Module:
    """Build `transformers/FOLDER`: what the `config.json` of a folder describes, without pretrained weights.

    Of texts, `input_ids` with an `attention_mask`, it classifies; of windows of token ids it predicts the next ones,
    and its vocabulary is the data's. Nothing is downloaded, and no code of the folder is run.

    Raises:
        UserError: transformers is not installed, the folder has no such file, or the model is not for such inputs.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"--model transformers/{folder} needs transformers: pip install 'echelon[transformers]'"
        ) from None
    path = Path(folder).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--model transformers/{folder}: {file} is not there: name a folder that transformers wrote")
    specs = data.several if isinstance(data.several, dict) else {"input_ids": data.several}
    ids = specs.get("input_ids")
    others = set(specs) - {"input_ids", "attention_mask"}
    if not isinstance(ids, TensorSpec) or not ids.count or others or (len(specs) == 1 and ids.count != data.classes):
        raise UserError(
            f"--model transformers/{folder} reads texts, or token ids whose next ones are the targets, the data has "
            f"{data.describe()}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
        kind: Any = transformers.AutoModelForCausalLM
        if isinstance(data.several, dict):
            kind, config.num_labels = transformers.AutoModelForSequenceClassification, data.classes
        _check_vocabulary(config, ids.count, f"--model transformers/{folder}")
        if not isinstance(data.several, dict):
            config.vocab_size = ids.count
        prepare_encoder_decoder(config)
        model: nn.Module = kind.from_config(config)
        if isinstance(data.several, dict):
            end_texts(model)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"--model transformers/{folder} cannot be built ({reason})") from error
    return model


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


def _check_vocabulary(config: Any, count: int, name: str) -> None:
    """Check that a model of transformers knows all tokens of the data, and tell it which one is padding.

    Raises:
        UserError: it knows fewer.
    """
    if count > config.vocab_size:
        raise UserError(
            f"{name} knows {config.vocab_size:,} tokens, the data has {count:,}: use --tokeniser with its folder"
        )
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0


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


def prepare_encoder_decoder(config: Any) -> None:
    """Say where a decoder begins: as T5 has it, with the padding token, unless the configuration says otherwise."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def end_texts(model: nn.Module) -> None:
    """Make a classifier of texts see each text with one end token, its last; does nothing to models without a decoder.

    Texts of the folder's own tokeniser end so already. To others it is added, or stands in place of the last token
    where the model has no more positions; where it stands inside of a text, it becomes padding.
    """
    config: Any = model.config
    end = getattr(config, "eos_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and isinstance(end, int):
        model.register_forward_pre_hook(_with_ends, with_kwargs=True)


def _with_ends(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = dict(kwargs)
    ids: Tensor = args[0] if args else kwargs.pop("input_ids")
    mask: Tensor | None = kwargs.pop("attention_mask", None)
    if mask is None:
        mask = torch.ones_like(ids)
    kwargs["attention_mask"], ids = ended(
        ids, mask, model.config.eos_token_id, model.config.pad_token_id, _positions(model.config)
    )[::-1]
    return (), {**kwargs, "input_ids": ids}


def _positions(config: Any) -> int | None:
    """Return how many tokens a model can take; None: any number."""
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def ended(ids: Tensor, mask: Tensor, end: int, padding: int, most: int | None) -> tuple[Tensor, Tensor]:
    """Return ids and mask (N, T or T + 1), the last seen token of each text, and no other, the end token.

    >>> ended(torch.tensor([[5, 6, 0], [5, 1, 0]]), torch.tensor([[1, 1, 0], [1, 1, 0]]), 1, 0, None)
    (tensor([[5, 6, 1],
            [5, 1, 0]]), tensor([[1, 1, 1],
            [1, 1, 0]]))
    """
    last = mask.sum(1).clamp(min=1) - 1
    lacks = ids.gather(1, last[:, None]).squeeze(1) != end
    if bool((lacks & (last == ids.shape[1] - 1)).any()) and (most is None or ids.shape[1] < most):
        ids = torch.cat([ids, ids.new_full((len(ids), 1), padding)], 1)
        mask = torch.cat([mask, mask.new_zeros(len(mask), 1)], 1)
    last = torch.where(lacks, (last + 1).clamp(max=ids.shape[1] - 1), last)
    at_end = torch.arange(ids.shape[1], device=ids.device) == last[:, None]
    ids = ids.masked_fill((ids == end) & ~at_end, padding).masked_fill(at_end, end)
    return ids, mask.masked_fill(at_end, 1)
