"""Models of transformers: built from a folder for the data; what they say of a text depends on no padding behind it.

Those for sounds are in `speech_of_transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.tokeniser import FOLDER_FILE
from echelon.models.base import ModelInput
from echelon.models.speech_of_transformers import are_sounds, build_for_sounds
from echelon.tasks.nest import TensorSpec, logits_in
from echelon.tasks.translation import DECODER_IDS, IDS, MASK, longest_written

_CLASSIFIER = "ForSequenceClassification"


class TextUse(StrEnum):
    """What a model of transformers is built for, by the class of transformers that builds it."""

    CLASSES = "AutoModelForSequenceClassification"
    NEXT_TOKENS = "AutoModelForCausalLM"
    MASKED_TOKENS = "AutoModelForMaskedLM"
    PAIRS = "AutoModelForSeq2SeqLM"


def build_transformers(folder: str, data: ModelInput) -> nn.Module:
    """Build `transformers/FOLDER`: what the `config.json` of a folder describes, without pretrained weights.

    Of texts, `input_ids` with an `attention_mask`, it classifies; with `decoder_input_ids` beside these it predicts the
    next tokens of a text from another one; of windows of token ids it predicts the next ones, or those that are masked.
    Of sounds it tells the class, or the symbols of which transcripts are made.
    Nothing is downloaded, and no code of the folder is run.

    Raises:
        UserError: transformers is not installed, the folder has no such file, or the model is not for such inputs.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"--model transformers/{folder} needs transformers: pip install 'echelon[transformers]'"
        ) from None
    path, name = Path(folder).expanduser(), f"--model transformers/{folder}"
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{name}: {file} is not there: name a folder that transformers wrote")
    if are_sounds(data.several):
        with _building(name):
            config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
            return build_for_sounds(transformers, config, data, name)
    use, ids = _use_of(data, name)
    with _building(name):
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
        _check_vocabulary(config, data.classes if use is TextUse.MASKED_TOKENS else ids.count, name)
        _set_padding(config, use)
        if use is TextUse.CLASSES:
            config.num_labels = data.classes
        elif use is TextUse.NEXT_TOKENS or not (file.parent / FOLDER_FILE).is_file():
            _set_vocabulary(config, ids.count)  # else the folder's weights fit, and some rows stay unused
        mask = _mask_of(file.parent, data.classes) if use is TextUse.MASKED_TOKENS else None
        if use is TextUse.MASKED_TOKENS and mask is None:
            _set_vocabulary(config, ids.count)
        if use is TextUse.PAIRS:
            _check_positions(config, data, name)
        prepare_encoder_decoder(config)
        model: nn.Module = getattr(transformers, use).from_config(config)
    if use is TextUse.CLASSES:
        end_texts(model)
    elif use is not TextUse.NEXT_TOKENS:
        model.register_forward_hook(partial(_of_vocabulary, data.classes))
    if mask is not None:
        model.register_forward_pre_hook(partial(_with_own_mask, data.classes, mask))
    return model


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Refuse in one line what transformers cannot build (UserError)."""
    try:
        yield
    except (ValueError, KeyError, OSError, TypeError, AttributeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{name} cannot be built ({reason})") from error


def _use_of(data: ModelInput, name: str) -> tuple[TextUse, TensorSpec]:
    """Return what data of texts asks a model for, and the spec of its ids.

    Raises:
        UserError: the data is no texts.
    """
    specs = data.several
    if isinstance(specs, TensorSpec) and specs.count and specs.count in (data.classes, data.classes + 1):
        return (TextUse.NEXT_TOKENS if specs.count == data.classes else TextUse.MASKED_TOKENS), specs
    ids = specs.get(IDS) if isinstance(specs, dict) else None
    if isinstance(ids, TensorSpec) and ids.count:
        if set(specs) <= {IDS, MASK}:
            return TextUse.CLASSES, ids
        if set(specs) == {IDS, MASK, DECODER_IDS} and ids.count == data.classes:
            return TextUse.PAIRS, ids
    raise UserError(
        f"{name} reads texts, to classify or to translate them, token ids whose next or masked ones are targets, or "
        f"sounds; the data has {data.describe()}: for images or tables name a function that builds a model "
        "(module:function)"
    )


def _set_vocabulary(config: Any, count: int) -> None:
    """Give a model the vocabulary of the data, and a padding token in it."""
    config.vocab_size = count
    if getattr(config, "decoder_vocab_size", None) is not None:  # Marian
        config.decoder_vocab_size = count
    if config.pad_token_id >= count:
        config.pad_token_id = 0


def _check_positions(config: Any, data: ModelInput, name: str) -> None:
    """Check that a model has positions for the longest sentence that it may be asked to write.

    Raises:
        UserError: it has fewer.
    """
    longest = max(longest_written(data.several[IDS].shape[0]) + 1, data.several[DECODER_IDS].shape[0])
    positions = _positions(config)
    if positions is not None and positions < longest:
        raise UserError(
            f"{name} takes at most {positions} tokens (max_position_embeddings), and translations of these sentences "
            f"may have {longest}: give its config.json more, or leave out the longest sentences"
        )


def _mask_of(folder: Path, count: int) -> int | None:
    """Return the mask of the tokeniser in a folder; None: it has none, or is not the one of so many tokens."""
    file = folder / FOLDER_FILE
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokeniser = Tokenizer.from_file(str(file))
    except Exception as error:
        raise UserError(f"{file}: it holds no tokeniser ({str(error).splitlines()[0]})") from error
    known = [each for each in map(tokeniser.token_to_id, ("[MASK]", "<mask>")) if each is not None]
    return int(known[0]) if known and tokeniser.get_vocab_size() == count else None


def _with_own_mask(number: int, mask: int, model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Put the tokeniser's mask in place of the data's, whose number is the size of the vocabulary."""
    return (args[0].masked_fill(args[0] == number, mask), *args[1:])


def _of_vocabulary(count: int, model: nn.Module, args: object, output: object) -> object:
    """Return logits of the data's tokens alone."""
    return logits_in(output)[..., :count]


def _check_vocabulary(config: Any, count: int, name: str) -> None:
    """Check that a model of transformers knows all tokens of the data.

    Raises:
        UserError: it knows fewer.
    """
    if count > config.vocab_size:
        raise UserError(
            f"{name} knows {config.vocab_size:,} tokens, the data has {count:,}: use --tokeniser with its folder"
        )


def _set_padding(config: Any, use: TextUse) -> None:
    """Say which token is padding, unless the configuration does: to classify, the end token, which no text lacks."""
    if getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        decodes_alone = use is TextUse.CLASSES and not getattr(config, "is_encoder_decoder", False)
        config.pad_token_id = end if decodes_alone and isinstance(end, int) and 0 <= end < config.vocab_size else 0


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
