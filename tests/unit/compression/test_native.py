"""The compiled loops give numpy's bits, and numpy does where they cannot be compiled."""

from __future__ import annotations

import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from echelon.collectives.ddp import warn_of_numpy
from echelon.compression import read
from echelon.compression.base import Codec, Meta, NonFiniteError
from echelon.compression.bits import pack_indices, unpack_indices
from echelon.compression.blocks import quantise, quantise_packed
from echelon.compression.codecs.int8 import Int8
from echelon.compression.native import Kernels, kernels_for, library, switched_off, why_numpy
from echelon.compression.registry import build, examples
from echelon.core.errors import UserError

SPECS = [spec for specs in examples().values() for spec in specs if "powersgd" not in spec]
# Sums in one block, in halves, and in halves that are no powers of 2; codes that end within a byte.
BLOCKS = [f"sign(block={block})" for block in (8, 136, 1000, 131_072)]
BLOCKS += [f"ternary(block={block})" for block in (1, 7, 77, 129, 100_000)]
BLOCKS += ["qsgd(levels=3, bucket=100)", "qsgd(levels=31, bucket=7)", "qsgd(1, 131072)", "int8(block=1)"]
NESTEROV = ["sign(nesterov=true, momentum=0.9)", "topk(0.02, nesterov=true, momentum=0.9)"]
SIZES = (0, 1, 9, 511, 4097, 140_001)
SCALES = {"usual": 1.0, "denormal": 1e-39, "tiny": 1e-36, "huge": 1e33, "overflowing": 5e37, "zero": 0.0}

compiled = pytest.mark.skipif(bool(why_numpy()), reason=f"no compiled loops here: {why_numpy()}")


def gradient(n: int, scale: float, seed: int) -> Tensor:
    """Elements of both signs, a third of them zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=generator)
    return normal * (torch.rand(n, generator=generator) > 0.3) * scale


def history(codec: Codec, n: int, scale: float) -> list[Tensor]:
    """Return what three messages and one that is refused leave, and what becomes of them."""
    state = codec.init_state("w", torch.empty(n), seed=3, stream=1)
    seen: list[Tensor] = []
    for step in range(4):
        tensor = gradient(n, scale, step)
        tensor[n // 2 : n // 2 + step // 3] = torch.nan  # in the last one
        try:
            message = codec.to_bytes(codec.compress(tensor, state))
            payload = codec.from_bytes(message, Meta.of(tensor))
            total = torch.ones(n)
            for alpha in (1.0, -1.0, 0.5):
                codec.add_to(total, payload, alpha)
            seen += [message, codec.extract(payload), total]
        except NonFiniteError:
            seen.append(torch.empty(0))
        seen += [memory.clone() for memory in state.elementwise.values()]
    numbers = [torch.tensor(float(v)) for k, v in state.numbers.items() if not k.endswith("_s")]
    return [*seen, *numbers]


@compiled
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("spec", SPECS + BLOCKS + NESTEROV)
def test_both_give_the_same_bits(spec: str, scale: float) -> None:
    codec, is_short = build(spec), "huffman" in spec or scale != 1.0
    for n in SIZES[:-1] if is_short else SIZES:
        made = history(codec, n, scale)
        with switched_off():
            wanted = history(build(spec), n, scale)
        assert len(made) == len(wanted)
        for actual, expected in zip(made, wanted, strict=True):
            assert torch.equal(actual.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)), n


@compiled
def test_numpy_computes_with_other_types_and_layouts() -> None:
    assert kernels_for(torch.ones(3)) is not None
    assert kernels_for(torch.ones(3), torch.ones(3, dtype=torch.float64)) is None
    assert kernels_for(torch.ones(3, 2).t()) is None
    with switched_off():
        assert kernels_for(torch.ones(3)) is None


@compiled
@pytest.mark.parametrize(
    ("n", "k"), [(0, 0), (9, 0), (9, 9), (100, 60), (1000, 4), (70_001, 300), (10**6, 1), (10**6, 9)]
)
def test_indices_have_the_same_bytes(n: int, k: int) -> None:
    indices = torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values
    packed = pack_indices(indices, n)
    assert torch.equal(unpack_indices(packed, n, k), indices)
    with switched_off():
        assert torch.equal(pack_indices(indices, n), packed)


@pytest.mark.parametrize("n", [999, 9000])
@pytest.mark.parametrize("spec", ["sign", "int8", "qsgd", "ternary"])
def test_a_tensor_of_another_length_than_its_message_is_refused(spec: str, n: int) -> None:
    codec, tensor = build(spec), torch.ones(1000)
    payload = codec.compress(tensor, codec.init_state("w", tensor))
    for context in (nullcontext(), switched_off()):
        with context:
            for decode in (codec.add_to, lambda out, coded: codec.extract(coded, out)):
                with pytest.raises(ValueError, match=f"message of 1000 elements does not fit a tensor of {n}"):
                    decode(torch.ones(n), payload)


@compiled
@pytest.mark.parametrize("spec", ["sign", "sign(momentum=0.9)", "topk(0.1, momentum=0.9)"])
def test_a_gradient_of_another_length_than_its_state_is_refused(spec: str) -> None:
    codec = build(spec)
    state = codec.init_state("w", torch.ones(1000))
    with pytest.raises(ValueError, match=r"10 elements does not go with one of 1000"):
        codec.compress(torch.ones(10), state)


@pytest.mark.parametrize("spec", ["sign", "int8", "qsgd", "ternary"])
def test_default_type_and_device_are_the_users(spec: str) -> None:
    tensor = torch.linspace(-1, 1, 1000)

    def sent() -> Tensor:
        codec = build(spec)
        return codec.to_bytes(codec.compress(tensor, codec.init_state("w", tensor)))

    wanted = sent()
    for context in (nullcontext(), switched_off()):
        torch.set_default_dtype(torch.float64)
        try:
            with context, torch.device("meta"):
                made = sent()
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(made, wanted)


@compiled
def test_what_c_would_misread_is_refused() -> None:
    kernels = kernels_for(torch.ones(3))
    assert kernels is not None
    for tensor in (torch.ones(3, dtype=torch.float64), torch.ones(6)[::2], torch.ones(3, device="meta")):
        with pytest.raises(ValueError, match=r"need a contiguous torch\.float32 on a CPU"):
            kernels.peak(tensor)
    with pytest.raises(ValueError, match="2 elements does not go with one of 3"):
        kernels.add_at(torch.ones(9), torch.arange(3), torch.ones(2), 1.0)
    for indices in ([-1, 2], [0, 10**9]):
        with pytest.raises(IndexError, match="cannot be packed"):
            pack_indices(torch.tensor(indices), 1000)


@compiled
def test_indices_beyond_a_tensor_are_refused() -> None:
    kernels = kernels_for(torch.ones(3))
    assert kernels is not None
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"index {index} is out of range of 3 elements"):
            kernels.add_at(torch.ones(3), torch.tensor([0, index]), torch.ones(2), 1.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(library.VARIABLE, raising=False)
    return tmp_path / "cache" / "echelon" / "kernels"


def fresh() -> library.Loaded:
    """Load as a process does that has not done so."""
    return library.load.__wrapped__()


@compiled
def test_it_is_compiled_once_however_many_begin(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(loading.result().library for loading in [pool.submit(fresh) for _ in range(4)])
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    assert fresh().library is not None and made.stat().st_mtime_ns == before
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@compiled
def test_a_file_that_was_cut_short_is_compiled_again(cache: Path) -> None:
    assert fresh().library is not None
    (made,) = cache.iterdir()
    code = made.read_bytes()
    made.unlink()  # this process has mapped it
    for size in (0, 8192, len(code) - 1):
        made.write_bytes(code[:size])
        assert fresh().library is not None and made.stat().st_size == len(code)
        made.unlink()


@compiled
def test_a_user_without_a_home_folder_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", library.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 9)  # whom no list of users has
    assert fresh().library is not None


@compiled
def test_flags_of_the_compiler_change_no_bits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -ffast-math")
    loaded = fresh().library
    assert loaded is not None
    x, codec = gradient(100_000, 1.0, 0), Int8()
    state = codec.init_state("w", x)
    steps, codes = quantise_packed(Kernels(loaded), x, codec.grid, codec.packing(len(x)), len(x), state)
    wanted = quantise(x, codec.grid, state)
    assert torch.equal(steps, wanted[0]) and torch.equal(codes, wanted[1])


@compiled
def test_a_cache_that_others_may_write_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert fresh().library is not None and not list(cache.iterdir())


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_it_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert fresh() == library.Loaded(None, "there is no C compiler (no-such-compiler) on this machine")
    failing = script(tmp_path / "failing", '[ "$1" = --version ] || { echo "k.c: error: no"; exit 4; }')
    monkeypatch.setenv("CC", failing)
    assert fresh().reason == f"{failing} failed with code 4: k.c: error: no"
    monkeypatch.setenv("CC", "'gcc")
    assert fresh().reason == "CC='gcc is no command: No closing quotation"
    monkeypatch.setenv("CC", script(tmp_path / "foreign", r"printf 'error \377\n'; exit 2"))
    assert fresh().reason.endswith("foreign failed with code 2: error \ufffd")
    empty = '[ "$1" = --version ] || { while [ "$1" != -o ]; do shift; done; : > "$2"; }'
    monkeypatch.setenv("CC", script(tmp_path / "empty", empty))
    assert "cannot be loaded" in fresh().reason
    assert not list(cache.glob(".*")), "nothing half made is left"


def test_without_a_folder_to_compile_in_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    monkeypatch.setenv("CC", "sh")
    assert fresh().reason.startswith("the loops cannot be compiled: [Errno 2] No such file or directory")


def test_a_compiler_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    hanging = script(tmp_path / "hanging", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(library.NativeError, match=r"hanging took more than 0\.5 s"):
        library._run([hanging], patience_s=0.5)
    child = int((tmp_path / "child").read_text())
    ends = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends, "what it started lives on"  # a signal takes a moment on a busy machine
        time.sleep(0.01)


def test_it_can_be_switched_off_and_only_in_these_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "off")
    assert fresh().reason == "ECHELON_NATIVE=off" and not cache.exists()
    monkeypatch.setenv(library.VARIABLE, "0")
    with pytest.raises(UserError, match=r"must be on .* or off"):
        fresh()


def test_a_run_says_why_numpy_computes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load.cache_clear()
    try:
        monkeypatch.setenv(library.VARIABLE, "off")
        assert read("none").numpy_notes() == []
        (note,) = read("sign").numpy_notes()
        assert note == "numpy computes, slower but with the same result: ECHELON_NATIVE=off"
        with pytest.warns(UserWarning, match="compression sign: numpy computes"):
            warn_of_numpy(read("sign"), torch.device("cpu"), rank=0, stacklevel=1)
    finally:
        library.load.cache_clear()
