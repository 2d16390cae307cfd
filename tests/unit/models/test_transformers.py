"""Models that a folder of transformers describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.models import ModelInput, build_model, fill_padding
from echelon.tasks.nest import TensorSpec

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: it is the extra `transformers`"
)
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
TEXTS = {"input_ids": TensorSpec((12,), "int64", 40, ragged=True), "attention_mask": TensorSpec((12,), "int64")}


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """A folder with a BERT of 50 tokens."""
    transformers.BertConfig(vocab_size=50, **SMALL).save_pretrained(tmp_path / "bert")
    return f"transformers/{tmp_path / 'bert'}"


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    """A folder with a GPT-2 of 50 tokens and 16 positions."""
    transformers.GPT2Config(vocab_size=50, n_layer=1, n_embd=16, n_head=2, n_positions=16).save_pretrained(tmp_path)
    return f"transformers/{tmp_path}"


def test_texts_are_classified_and_padding_is_not_seen(bert: str, gpt2: str) -> None:
    for name in (bert, gpt2):
        model = build_model(ModelConfig(name=name), ModelInput(3, 1, 1, several=TEXTS)).eval()
        ids, mask = torch.randint(1, 40, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
        mask[:, 8:] = 0
        ids[:, 8:] = 0
        logits = model(input_ids=ids, attention_mask=mask)
        assert isinstance(logits, torch.Tensor) and logits.shape == (2, 3)
        torch.testing.assert_close(logits, model(input_ids=ids[:, :8], attention_mask=mask[:, :8]))


@pytest.mark.parametrize(("end", "padding"), [(49, 49), (50256, 0)])
def test_a_texts_last_token_counts_whatever_it_is(end: int, padding: int, tmp_path: Path) -> None:
    size = {"vocab_size": 50, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}
    transformers.GPT2Config(**size, bos_token_id=end, eos_token_id=end).save_pretrained(tmp_path)
    model = build_model(ModelConfig(name=f"transformers/{tmp_path}"), ModelInput(3, 1, 1, several=TEXTS)).eval()
    assert model.config.pad_token_id == padding
    short, long = (model(input_ids=torch.tensor([ids])) for ids in ([5, 6], [5, 6, 0]))
    assert torch.equal(short, long) == (padding == 0)


def _config(kind: str, pad: int) -> Any:
    shape = {"vocab_size": 50, "pad_token_id": pad}
    if kind == "GPT2":
        return transformers.GPT2Config(**shape, n_layer=1, n_embd=16, n_head=2, n_positions=16)
    if kind == "Roberta":  # its positions begin behind the number of its padding
        return transformers.RobertaConfig(**shape, **SMALL, max_position_embeddings=12 + pad + 1)
    if kind == "DistilBert":
        return transformers.DistilBertConfig(**shape, n_layers=1, dim=16, n_heads=2, hidden_dim=16)
    if kind == "T5":
        return transformers.T5Config(**shape, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return getattr(transformers, f"{kind}Config")(**shape, **SMALL)


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert", "Roberta", "DistilBert", "T5"])
def test_a_text_is_classified_the_same_alone_and_padded_whatever_the_models_padding_is(
    kind: str, pad: int, tmp_path: Path
) -> None:
    _config(kind, pad).save_pretrained(tmp_path)
    model = build_model(ModelConfig(name=f"transformers/{tmp_path}"), ModelInput(3, 1, 1, several=TEXTS)).eval()
    short, long = torch.tensor([7, 8, 9]), torch.arange(10, 22)
    both = torch.nn.utils.rnn.pad_sequence([short, long], batch_first=True)  # padded with 0, as batches are
    logits = model(input_ids=both, attention_mask=(both != 0).long())
    for text, expected in zip((short, long), logits, strict=True):
        alone = model(input_ids=text[None], attention_mask=torch.ones_like(text)[None])
        torch.testing.assert_close(alone[0], expected)


def test_a_classifier_of_ones_own_does_not_see_the_padding() -> None:
    config = _config("GPT2", 5)
    config.num_labels = 3
    model = transformers.GPT2ForSequenceClassification(config).eval()
    fill_padding(model)
    ids, mask = torch.tensor([[7, 8, 9, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    alone = model(input_ids=ids[:, :3], attention_mask=mask[:, :3]).logits
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, alone)


def test_encoder_decoders_read_the_class_from_an_end_token_that_every_text_gets(tmp_path: Path) -> None:
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    transformers.T5Config(**small, decoder_start_token_id=None).save_pretrained(tmp_path / "t5")
    name = f"transformers/{tmp_path / 't5'}"
    model = build_model(ModelConfig(name=name), ModelInput(3, 1, 1, several=TEXTS)).eval()
    ids, mask = torch.randint(4, 40, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    ids[1, 8:], mask[1, 8:] = 0, 0
    logits = model(input_ids=ids, attention_mask=mask)
    ids[1, 8], mask[1, 8] = 1, 1  # as its own tokeniser ends a text
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask), logits)
    torch.testing.assert_close(model(input_ids=ids[1:, :9], attention_mask=mask[1:, :9]), logits[1:])


def test_windows_of_tokens_get_the_vocabulary_of_the_data(gpt2: str) -> None:
    def build(count: int, context: int = 16) -> torch.nn.Module:
        return build_model(
            ModelConfig(name=gpt2),
            ModelInput(count, 1, 1, several=TensorSpec((context,), "int64", count), wrong_outputs=lambda *_: ""),
        )

    assert build(40)(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, 40)
    with pytest.raises(UserError, match="knows 50 tokens, the data has 60: use --tokeniser"):
        build(60)
    with pytest.raises(UserError, match="cannot take inputs"):
        build(40, context=17)


PAIRS = {**TEXTS, "decoder_input_ids": TensorSpec((10,), "int64", 40, ragged=True)}
ENDS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
ENDS |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "vocab_size": 50, "max_position_embeddings": 32}


def _pairs(kind: str) -> Any:
    if kind == "T5":
        return _config("T5", 0)
    if kind == "Bart":
        return transformers.BartConfig(**ENDS, pad_token_id=1)
    return transformers.MarianConfig(**ENDS, pad_token_id=49, decoder_start_token_id=49, decoder_vocab_size=50)


@pytest.mark.parametrize("kind", ["T5", "Bart", "Marian"])
@pytest.mark.parametrize("has_tokeniser", [False, True])
def test_pairs_of_texts_are_translated_and_padding_changes_nothing(
    kind: str, has_tokeniser: bool, tmp_path: Path
) -> None:
    _pairs(kind).save_pretrained(tmp_path)
    if has_tokeniser:
        (tmp_path / "tokenizer.json").write_text("{}")
    data = ModelInput(40, 1, 1, several=PAIRS, wrong_outputs=lambda *_: "")
    model = build_model(ModelConfig(name=f"transformers/{tmp_path}"), data).eval()
    assert model.config.vocab_size == (50 if has_tokeniser else 40), "the folder's weights fit its own tokens"
    ids, mask, given = torch.randint(2, 40, (2, 12)), torch.ones(2, 12, dtype=torch.int64), torch.randint(2, 40, (2, 5))
    ids[:, 8:], mask[:, 8:] = 0, 0
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=given)
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 5, 40)
    longer = torch.cat([given, torch.zeros(2, 3, dtype=torch.int64)], 1)
    for other in (
        model(input_ids=ids[:, :8], attention_mask=mask[:, :8], decoder_input_ids=given),
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=longer)[:, :5],
    ):
        torch.testing.assert_close(other, logits)


def test_translations_that_a_model_has_no_positions_for_are_refused(bert: str, tmp_path: Path) -> None:
    transformers.BartConfig(**{**ENDS, "max_position_embeddings": 20}).save_pretrained(tmp_path)
    data = ModelInput(40, 1, 1, several=PAIRS, wrong_outputs=lambda *_: "")
    with pytest.raises(UserError, match=r"takes at most 20 tokens .* may have 24"):
        build_model(ModelConfig(name=f"transformers/{tmp_path}"), data)
    with pytest.raises(UserError, match=r"cannot be built .*AutoModelForSeq2SeqLM"):
        build_model(ModelConfig(name=bert), data)


def test_masked_tokens_are_predicted_of_the_datas_vocabulary(bert: str) -> None:
    data = ModelInput(40, 1, 1, several=TensorSpec((12,), "int64", 41), wrong_outputs=lambda *_: "")
    model = build_model(ModelConfig(name=bert), data).eval()
    assert model.config.vocab_size == 41, "one more for the mask"
    assert model(torch.full((2, 12), 40)).shape == (2, 12, 40)
    with pytest.raises(UserError, match="knows 50 tokens, the data has 60"):
        build_model(
            ModelConfig(name=bert),
            ModelInput(60, 1, 1, several=TensorSpec((12,), "int64", 61), wrong_outputs=lambda *_: ""),
        )


def test_masks_are_those_of_the_folders_tokeniser(bert: str) -> None:
    words = {"[MASK]": 4, **{f"w{i}": i for i in range(50) if i != 4}}
    Tokenizer(WordLevel(words, unk_token="w0")).save(f"{bert.removeprefix('transformers/')}/tokenizer.json")
    data = ModelInput(50, 1, 1, several=TensorSpec((12,), "int64", 51), wrong_outputs=lambda *_: "")
    model = build_model(ModelConfig(name=bert), data).eval()
    assert model.config.vocab_size == 50, "the folder's weights fit"
    torch.testing.assert_close(model(torch.full((1, 12), 50)), model(torch.full((1, 12), 4)))


def test_what_is_no_folder_or_no_text_is_refused(bert: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not there: name a folder that transformers wrote"):
        build_model(ModelConfig(name="transformers/nowhere"), ModelInput(3, 1, 1, several=TEXTS))
    with pytest.raises(UserError, match=r"reads texts, to classify .* \(module:function\)"):
        build_model(ModelConfig(name=bert), ModelInput(3, 1, 8))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be built"):
        build_model(ModelConfig(name=f"transformers/{tmp_path}"), ModelInput(3, 1, 1, several=TEXTS))
