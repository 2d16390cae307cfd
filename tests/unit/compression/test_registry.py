"""Specs of codecs: what is built, what is refused and with which words."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from echelon.compression.registry import build, codec_class, examples, names, read
from echelon.compression.transforms import ErrorFeedback, Huffman, Transformed
from echelon.core.errors import UserError


def test_every_file_is_a_codec() -> None:
    assert set(names()) >= {"none", "fp16", "bf16", "int8", "qsgd", "ternary", "sign", "threshold", "topk", "powersgd"}
    for name in names():
        assert build(examples()[name][0]).name == name


@pytest.mark.parametrize("name", names())
def test_every_codec_says_its_bits_its_bias_and_its_paper(name: str) -> None:
    words = codec_class(name).__doc__ or ""
    assert re.search(r"(?i)\bbits\b", words)
    assert re.search(r"(?i)\b(un)?biased\b", words)
    assert name == "none" or re.search(r"Papers?: ", words)


def test_naming_codecs_does_not_import_torch() -> None:
    code = "import sys, echelon.compression.registry as c; c.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_wrappers_stand_in_order() -> None:
    codec = build("topk(0.01)+huffman")
    assert isinstance(codec, Huffman) and isinstance(codec.inner, Transformed)
    assert codec.inner.transforms == (ErrorFeedback(),)
    assert codec.name == "topk+huffman" and codec.biased and not codec.fixed_size
    assert not isinstance(build("int8"), Transformed)


@pytest.mark.parametrize(
    "text",
    ["none", "topk(0.01)+huffman", "sign(vote=true, momentum=0.9)", "sign(vote=true, block=4096)", "powersgd", "int8"],
)
def test_what_travels_is_written_as_the_spec_that_it_is_read_from(text: str) -> None:
    compression = read(text)
    assert read(str(compression)) == compression
    assert compression.encodes == (text != "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topkk(0.01)", "did you mean topk"),
        ("huffman", r"qsgd\+huffman"),
        ("fp16+huffman", "fp16 alone"),
        ("powersgd+huffman", "no symbols"),
        ("topk(0.01)+int8", "only .huffman can follow"),
        ("topk(0.01)+hufman", "did you mean huffman"),
        ("qsgd+huffman+huffman", "one .huffman is enough"),
        ("qsgd+huffman(12)", "no settings"),
        ("topk", "density"),
        ("topk(1.5)", "nearest is 1"),
        ("topk(0)", "above 0"),
        ("topk(0.01, desnity=2)", "did you mean density"),
        ("topk(0.01, momentum=1.2)", "below 1"),
        ("topk(0.01, values=int3)", "bf16, fp32, sign"),
        ("threshold", "either tau"),
        ("threshold(tau=1.0, density=0.1)", "either tau"),
        ("qsgd(levels=200)", "nearest is 127"),
        ("qsgd(levels=0)", "nearest is 1"),
        ("int8(block=0)", "nearest is 1"),
        ("sign(block=12)", "multiple of 8"),
        ("sign(vote=3)", "true or false"),
        ("powersgd(rank=0)", "nearest is 1"),
        ("bf16(3)", "no settings"),
        ("threshold(0.01)", "name the setting"),
        ("sign(magnitude=0.5)", "without vote=true"),
        ("sign(vote=true, block=512)", "leave block out"),
        ("threshold(tau=nan)", "finite number"),
        ("ternary(clip=inf)", "finite number"),
    ],
)
def test_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(text)


def test_weight_decay_stays_as_strong_when_momentum_leaves_the_optimizer() -> None:
    assert read("topk(0.01, momentum=0.9)").decay_factor(0.9) == pytest.approx(10)
    assert read("sign(vote=true, momentum=0.9)").decay_factor(0.9) == 1


def test_momentum_goes_inside_where_the_codec_applies_it() -> None:
    assert read("topk(0.01)").with_momentum(0.9) == (read("topk(0.01, momentum=0.9)"), 0.0)
    assert read("sign+huffman").with_momentum(0.9) == (read("sign(momentum=0.9)+huffman"), 0.0)
    assert read("topk(0.01, momentum=0)").with_momentum(0.9) == (read("topk(0.01, momentum=0)"), 0.9)
    assert read("topk(0.01, momentum=0.9)").with_momentum(0.9) == (read("topk(0.01, momentum=0.9)"), 0.0)
    assert read("powersgd(rank=2)").with_momentum(0.9) == (read("powersgd(rank=2)"), 0.9)
    assert read("topk(0.01)").with_momentum(0.0) == (read("topk(0.01)"), 0.0)
    looking = "topk(0.01, momentum=0.9, nesterov=true)"
    assert read("topk(0.01)").with_momentum(0.9, nesterov=True) == (read(looking), 0.0)
    assert read("topk(0.01, momentum=0.9)").with_momentum(0.0, nesterov=True) == (read(looking), 0.0)
    assert read("topk(0.01, nesterov=true)").with_momentum(0.9) == (
        read("topk(0.01, nesterov=true, momentum=0.9)"),
        0.0,
    )
    without = "topk(0.01, nesterov=false, momentum=0.9)"
    assert read("topk(0.01, nesterov=false)").with_momentum(0.9, nesterov=True) == (read(without), 0.0)
    assert read("powersgd(2)").with_momentum(0.9, nesterov=True) == (read("powersgd(2)"), 0.9)
    assert read("topk(0.01, momentum=0)").with_momentum(0.9, nesterov=True) == (read("topk(0.01, momentum=0)"), 0.9)
    with pytest.raises(UserError, match="there is none: leave nesterov out"):
        read("topk(0.01, nesterov=true)").with_momentum(0.0)
    with pytest.raises(UserError, match="make them equal"):
        read("topk(0.01, momentum=0.8)").with_momentum(0.9)
    with pytest.raises(UserError, match="spoils training"):
        read("sign(momentum=0.0)").with_momentum(0.9)
