"""From a spec such as `topk(0.01)+huffman` to a codec. Naming codecs does not import torch; building one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.core.errors import UserError, unknown
from echelon.core.registry import Registry
from echelon.core.spec import Spec, Value, bind, parse_chain

if TYPE_CHECKING:
    from echelon.compression.base import Codec

ENTROPY_CODER = "huffman"
CODECS = Registry("echelon.compression.codecs", "compression", "CODEC")


def names() -> list[str]:
    """Return the codecs that exist: the files of `codecs/`."""
    return CODECS.names()


def examples() -> dict[str, tuple[str, ...]]:
    """Return, for every codec by name, specs that can be built, the simplest first; imports torch."""
    return {name: codec_class(name).examples or (name,) for name in names()}


def codec_class(name: str) -> type[Codec]:
    """Return the settings class of a codec.

    Raises:
        UserError: no such codec; names the nearest.
    """
    if name == ENTROPY_CODER:
        raise UserError(f"compression 'huffman' codes the symbols of another codec: write for example qsgd+{name}")
    codec: type[Codec] = CODECS.settings_class(name)
    return codec


def build(text: str) -> Codec:
    """Build what a spec names, with error feedback and the worker's momentum around it where the codec needs them.

    Example: `build("topk(0.01)+huffman")`.

    Raises:
        UserError: an unknown codec or setting, an impossible value, or a chain that cannot work; names what does.
    """
    first, *rest = parse_chain(text)
    codec = bind(first, codec_class(first.name))
    _check_chain(text, codec, rest)
    from echelon.compression.transforms import combine

    return combine(codec, entropy_coding=bool(rest))


def leaves_momentum(text: str) -> bool:
    """Whether the codec wants momentum before its encoding, and its spec does not say how much.

    Raises:
        UserError: as `build`.
    """
    build(text)
    first, *_ = parse_chain(text)
    return getattr(bind(first, codec_class(first.name)), "momentum", 0.0) is None


def place_momentum(text: str, momentum: float, nesterov: bool = False) -> tuple[str, float]:
    """Decide where momentum is applied: inside the codec, before encoding, where that is how the codec works.

    Args:
        text: the compression's spec.
        momentum: what the user asked of the optimizer (the SGD family's momentum; 0 for others).
        nesterov: the optimizer's momentum is Nesterov's; so is the codec's then, unless its spec says otherwise.

    Returns:
        the spec to build, and the momentum that is left for the optimizer.

    Example: `place_momentum("topk(0.01)", 0.9)` is `("topk(0.01, momentum=0.9)", 0.0)`.

    Raises:
        UserError: the spec and the optimizer contradict each other; says what works.
    """
    first, *rest = parse_chain(text)
    codec = bind(first, codec_class(first.name))
    form = (("nesterov", True),) if nesterov and getattr(codec, "nesterov", False) is None else ()
    if getattr(codec, "momentum", 0.0) is None and momentum:
        return _with(first, rest, ("momentum", momentum), *form), 0.0
    applied = codec.absorbs_momentum
    if codec.looks_ahead and not applied:
        raise UserError(f"compression {first}: nesterov is a form of momentum, and there is none: leave nesterov out")
    if applied and momentum not in (0.0, applied):
        raise UserError(
            f"compression {first} applies its momentum before encoding, but optimizer.momentum is {momentum}: "
            f"make them equal, or leave momentum out of the compression"
        )
    if codec.momentum_inside and momentum and not applied:
        raise UserError(
            f"compression {first}: optimizer.momentum {momentum} after decoding spoils training; leave momentum out of "
            f"the compression, which then takes the optimizer's, or set optimizer.momentum to 0"
        )
    return (_with(first, rest, *form), 0.0) if applied else (text, momentum)


def _with(first: Spec, rest: Sequence[Spec], *more: tuple[str, Value]) -> str:
    return "+".join(str(spec) for spec in (replace(first, kwargs=(*first.kwargs, *more)), *rest))


def decay_factor(text: str, momentum: float) -> float:
    """Return what weight decay is multiplied by where this momentum has left SGD for a codec.

    SGD's momentum m multiplies its decay, too, which adds up to 1 / (1 - m) times itself as weights change slowly.
    Signs (Bernstein et al. 2018) are decayed as they are.
    """
    return 1.0 if build(text).direction else 1.0 / (1.0 - momentum)


def _check_chain(text: str, codec: Codec, rest: list[Spec]) -> None:
    """Refuse what cannot follow a codec."""
    for spec in rest:
        if spec.name != ENTROPY_CODER:
            known = [*names(), ENTROPY_CODER]
            if spec.name not in known:
                raise unknown("compression", spec.name, known)
            raise UserError(f"compression {text!r}: only +{ENTROPY_CODER} can follow a codec; choose one of the others")
        if spec.args or spec.kwargs:
            raise UserError(f"compression {text!r}: {ENTROPY_CODER} takes no settings; write +{ENTROPY_CODER}")
    if len(rest) > 1:
        raise UserError(f"compression {text!r}: one +{ENTROPY_CODER} is enough")
    if rest and not codec.takes_entropy_coding:
        raise UserError(
            f"compression {text!r}: {codec.name} sends no symbols that +{ENTROPY_CODER} could shorten; "
            f"write {codec.name} alone, or qsgd+{ENTROPY_CODER}"
        )
