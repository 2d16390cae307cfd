"""Models of transformers: built from a folder for the data; what they say of a text depends on no padding behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.models.base import ModelInput
from echelon.tasks.nest import TensorSpec

IDS, MASK = "input_ids", "attention_mask"
_CLASSIFIER = "ForSequenceClassification"


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


def prepare_encoder_decoder(config: Any) -> None:
    """Say where a decoder begins: as T5 has it, with the padding token, unless the configuration says otherwise."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id


def fill_padding(model: nn.Module) -> None:
    """Make a classifier of texts see its own padding token where the mask says that there is none, in place.

    Batches are padded with zeros; models without a first token for the whole text read the class from the last token
    that is not their padding. Does nothing to other models, nor without a mask.
    """
    if type(model).__name__.endswith(_CLASSIFIER) and hasattr(getattr(model, "config", None), "get_text_config"):
        model.register_forward_pre_hook(_with_own_padding, with_kwargs=True)


def _with_own_padding(
    model: Any, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    ids, mask = kwargs.get(IDS), kwargs.get(MASK)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(padding, int) and isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.shape == mask.shape:
        kwargs = {**kwargs, IDS: ids.masked_fill(mask == 0, padding)}
    return args, kwargs


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
