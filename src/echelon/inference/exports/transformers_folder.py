"""A folder for transformers: config.json with the classes, the weights, and the tokeniser or the feature extractor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from echelon.core.errors import UserError
from echelon.data.columns import MOST_TOKENS
from echelon.data.sound_features import open_features
from echelon.data.tokenisers import LibraryTokeniser
from echelon.inference.exports.base import ExportFormat, Predictor
from echelon.inference.exports.torch_program import quiet
from echelon.models import fill_padding, hear_no_padding
from echelon.run.trained import TrainedModel
from echelon.tasks import nest
from echelon.tasks.nest import Nest

_SPECIAL = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
    "bos_token": "[BOS]", "eos_token": "[EOS]",
}  # fmt: skip


class TransformersFolder(ExportFormat):
    """What `from_pretrained` of transformers reads."""

    def write(self, trained: TrainedModel, path: Path, example: Nest) -> None:
        """Write model, and tokeniser or feature extractor, as `save_pretrained` does."""
        model = _of_transformers(trained, path)
        if trained.info.classes:
            model.config.id2label = dict(enumerate(trained.info.classes))
            model.config.label2id = {name: i for i, name in enumerate(trained.info.classes)}
        model.config.architectures = [type(model).__name__]
        with quiet():
            model.save_pretrained(path)
        if (rate := trained.info.rate) and (extractor := open_features(trained.features).extractor(rate)):
            extractor.save_pretrained(path)
        if isinstance(tokeniser := trained.info.tokeniser, LibraryTokeniser):  # others are our own
            _of_transformers_too(tokeniser, trained.task.encoding.judges_text).save_pretrained(path)

    def read(self, trained: TrainedModel, path: Path) -> Predictor:
        """Return the model that `from_pretrained` makes of the folder."""
        kind: Any = type(_of_transformers(trained, path))
        with quiet():
            model = kind.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
        fill_padding(model)
        hear_no_padding(model)

        def outputs(inputs: Nest) -> Any:
            """Return the logits, of the run's own tokens or classes alone: the folder may know more tokens."""
            given = nest.logits_in(nest.call(model, inputs))
            return given[..., : trained.task.outputs or None]

        return outputs


def _of_transformers_too(tokeniser: LibraryTokeniser, cuts: bool) -> Any:
    """Return a tokeniser as transformers has it, which makes of a text what it was trained as.

    Args:
        cuts: texts were cut where they are long.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    written = json.loads(tokeniser.library.to_str())
    if not tokeniser.adds_marks:
        written["post_processor"] = None
    known = {name: text for name, text in _SPECIAL.items() if tokeniser.special(text) is not None}
    longest = {"model_max_length": MOST_TOKENS} if cuts else {}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)), **known, **longest)


def _of_transformers(trained: TrainedModel, path: Path) -> Any:
    """Return the model, which is one of transformers.

    Raises:
        UserError: it is none, or transformers is not installed.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise UserError(f"{path}: a folder for transformers needs it: pip install 'echelon[transformers]'") from None
    if not isinstance(trained.model, PreTrainedModel):
        raise UserError(
            f"{path}: the model {trained.config.model.name} is none of transformers: write a file that ends in "
            ".safetensors, .onnx or .pt2"
        )
    return trained.model
