"""Tokenisers: text to ids and back, trained once, kept with the run."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from echelon.config import DataConfig, RunConfig
from echelon.core.errors import UserError
from echelon.core.tokeniser import FOLDER_FILE, TokeniserChoice, read_tokeniser
from echelon.data import tokenisers
from echelon.data.base import DataRequest
from echelon.data.columns import IDS, encode_texts
from echelon.data.preparation import read_preparation
from echelon.data.tokenisers import (
    PAD,
    RUN_FILE,
    Characters,
    LibraryTokeniser,
    read_json,
    tokeniser_for,
    train_byte_pairs,
)
from echelon.run.resolve import check_names

TEXTS = ["the cat sat on the mat", "the dog sat on the cat"] * 4


def request(folder: Path, spec: str = "auto", run: Path | None = None) -> DataRequest:
    config = DataConfig(root=str(folder), tokeniser=spec)
    return DataRequest(config, folder=run, preparation=read_preparation(config, run))


@pytest.mark.parametrize("text", ["", "naïve ☃\n\n  two", "the cat\tsat"])
@pytest.mark.parametrize("tokeniser", [train_byte_pairs(TEXTS, 400), Characters.of(["naïve ☃\n two the cat\tsat"])])
def test_text_comes_back(tokeniser: LibraryTokeniser | Characters, text: str, tmp_path: Path) -> None:
    (ids,) = tokeniser.encode([text])
    assert tokeniser.decode(ids.tolist()).lstrip(" ") == text
    assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < tokeniser.count
    (tmp_path / "kept.json").write_text(tokeniser.to_json())
    again = read_json(tmp_path / "kept.json")
    assert again.encode([text])[0].tolist() == ids.tolist() and again.count == tokeniser.count


def test_byte_pairs_are_the_same_for_the_same_texts_and_smaller_than_characters() -> None:
    first, again = (train_byte_pairs(TEXTS, 400) for _ in range(2))
    assert first.to_json() == again.to_json()
    assert len(first.encode(["the cat"])[0]) < len("the cat")
    assert 0 not in first.encode([PAD.lower()])[0], "0 is padding's alone"


def test_characters_that_are_not_of_the_alphabet_are_one_token() -> None:
    tokeniser = Characters.of(["ab"])
    assert tokeniser.encode(["azb€"])[0].tolist() == [1, 0, 2, 0]
    assert Characters("").encode(["ab"])[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    "texts, name", [(["abc" * 9], "characters"), (TEXTS, "bpe"), (["".join(map(chr, range(500)))], "bpe")]
)
def test_auto_takes_characters_of_one_text_of_few(texts: list[str], name: str) -> None:
    assert tokenisers.resolved(read_tokeniser("auto"), texts) == TokeniserChoice(name)


def test_a_tokeniser_is_trained_once_and_kept_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, run = [], tmp_path / "run"
    run.mkdir()

    def train(texts: list[str], size: int) -> LibraryTokeniser:
        trained.append(size)
        return train_byte_pairs(texts, size)

    monkeypatch.setattr(tokenisers, "train_byte_pairs", train)
    asked = request(tmp_path / "data", "bpe(400)", run)
    with ThreadPoolExecutor(3) as several:
        made = list(several.map(lambda _: tokeniser_for(asked, TEXTS).to_json(), range(3)))
    assert trained == [400] and len(set(made)) == 1
    shutil.rmtree(tmp_path / "data")
    assert tokeniser_for(asked, ["other texts"]).to_json() == made[0] == (run / RUN_FILE).read_text()
    assert trained == [400], "a run that goes on has its own"


def test_one_of_transformers_is_taken_from_its_folder(tmp_path: Path) -> None:
    tokeniser = train_byte_pairs(TEXTS, 400)
    (tmp_path / "tokenizer.json").write_text(tokeniser.to_json())
    taken = tokeniser_for(request(tmp_path / "data", str(tmp_path)), ["other"])
    assert taken.to_json() == tokeniser.to_json()


@pytest.mark.parametrize(
    "spec, said",
    [
        ("bep(8000)", "unknown tokeniser 'bep(8000)': write auto, bpe(8000), characters"),
        ("bpe(20)", "at least 300"),
        ("bpe(much)", "--tokeniser"),
    ],
)
def test_what_is_no_tokeniser_is_refused(spec: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_tokeniser(spec)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "content, said", [(None, "cannot be read"), ("{}", "it holds no tokeniser"), ("x", "it holds no")]
)
def test_a_file_that_holds_no_tokeniser_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as refused:
        tokeniser_for(request(tmp_path, str(tmp_path)), TEXTS)
    assert said in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.fixture
def marking(tmp_path: Path) -> Path:
    """A folder with a tokeniser of words that puts [CLS] before each text and [SEP] behind it."""
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    (tmp_path / "bert").mkdir()
    tokenizer.save(str(tmp_path / "bert" / FOLDER_FILE))
    return tmp_path / "bert"


def test_texts_to_be_classified_get_the_marks_of_a_folders_tokeniser_and_a_cut_one_keeps_them(marking: Path) -> None:
    column = encode_texts(request(marking.parent, str(marking)), ["a b", "", "a " * 600], 3)
    assert [column.inputs[IDS][i].tolist() for i in range(2)] == [[1, 3, 4, 2], [1, 2]]
    assert column.inputs[IDS][2].tolist() == [1, *[3] * 510, 2]


def test_texts_that_are_written_on_get_no_marks(marking: Path) -> None:
    tokeniser = tokeniser_for(request(marking.parent, str(marking)), TEXTS)
    assert [row.tolist() for row in tokeniser.encode(["a b", ""])] == [[3, 4], []]


@pytest.mark.parametrize("adds_marks", [True, False])
def test_a_run_marks_texts_as_it_did_when_it_began_and_so_does_one_tuned_from_it(
    adds_marks: bool, marking: Path
) -> None:
    run, tuned = marking.parent / "run", marking.parent / "tuned"
    run.mkdir()
    tuned.mkdir()
    if adds_marks:
        tokeniser_for(request(marking.parent, str(marking), run), TEXTS, adds_marks=True)
    else:  # as runs kept it that added none
        shutil.copy(marking / FOLDER_FILE, run / RUN_FILE)
    expected = [1, 3, 4, 2] if adds_marks else [3, 4]
    for asked in (request(marking.parent, str(marking), run), request(marking.parent, str(run), tuned)):
        made = encode_texts(asked, ["a b"], 1)
        assert made.inputs[IDS][0].tolist() == expected and made.tokeniser == read_json(run / RUN_FILE)
    assert tokeniser_for(request(marking.parent, str(run)), TEXTS).encode(["a b"])[0].tolist() == [3, 4]


def test_a_run_that_keeps_its_tokeniser_goes_on_where_the_one_that_it_named_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(run=str(tmp_path), data=DataConfig(tokeniser="base"))  # a run's folder, by its bare name
    with pytest.raises(UserError, match="unknown tokeniser 'base'"):
        check_names(config)
    (tmp_path / RUN_FILE).write_text("{}")
    check_names(config)
