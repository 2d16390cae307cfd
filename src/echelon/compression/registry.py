"""From a spec such as `topk(0.01)+huffman` to a codec. Naming codecs does not import torch; building one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from echelon.core.errors import UserError, unknown
from echelon.core.registry import Registry
from echelon.core.spec import Spec, spec_of

if TYPE_CHECKING:
    from echelon.compression.base import Codec

ENTROPY_CODER = "huffman"
CODECS = Registry("echelon.compression.codecs", "compression", "CODEC")


@dataclass(frozen=True)
class Compression:
    """What travels instead of a tensor: a codec's settings, and whether its symbols are entropy coded.

    Error feedback, and the worker's momentum with it, are put around the codec by `build`.

    Attributes:
        messages: how often a run sends each tensor (`for_run`); 0: not known.
    """

    codec: Codec
    entropy_coding: bool = False
    messages: int = 0

    @property
    def encodes(self) -> bool:
        """Whether anything is encoded; else tensors travel as they are."""
        return self.codec.name != "none"

    @property
    def leaves_momentum(self) -> bool:
        """Whether the codec wants momentum before its encoding, and its settings do not say how much."""
        return getattr(self.codec, "momentum", 0.0) is None

    def build(self) -> Codec:
        """Return the codec, with error feedback and the worker's momentum around it where it needs them."""
        from echelon.compression.transforms import with_transforms

        nearly_whole = codec_class("bf16" if self.codec.linear else "int8")()  # a sum of int8 is no int8
        return with_transforms(self.codec, self.entropy_coding, self.codec.whole_steps(self.messages), nearly_whole)

    def for_run(self, messages: int) -> Compression:
        """Return the compression of a run that sends each tensor so often: what begins and ends it is settled."""
        return replace(self, codec=self.codec.for_run(messages), messages=messages)

    def without_whole_start(self) -> Compression:
        """Return it for senders that keep what it leaves out (`Codec.without_whole_start`)."""
        return replace(self, codec=self.codec.without_whole_start())

    def length_notes(self) -> list[str]:
        """Say what begins and ends the run (`for_run` was called), and whether it is too short for the codec."""
        return self.codec.length_notes(self.messages)

    def numpy_notes(self) -> list[str]:
        """Say why numpy computes what codecs have compiled loops for; compiles them where that has not been done."""
        from echelon.compression.native import why_numpy

        reason = why_numpy() if self.encodes else ""
        return [f"numpy computes, slower but with the same result: {reason}"] if reason else []

    def with_momentum(self, momentum: float, nesterov: bool = False) -> tuple[Compression, float]:
        """Decide where momentum is applied: inside the codec, before encoding, where that is how the codec works.

        Args:
            momentum: what the user asked of the optimizer (the SGD family's momentum; 0 for others).
            nesterov: the optimizer's momentum is Nesterov's; so is the codec's then, unless its settings say otherwise.

        Returns:
            the compression to build, and the momentum that is left for the optimizer.

        Example: `read("topk(0.01)").with_momentum(0.9)` is `(read("topk(0.01, momentum=0.9)"), 0.0)`.

        Raises:
            UserError: codec and optimizer contradict each other; says what works.
        """
        codec = self.codec
        form = {"nesterov": True} if nesterov and getattr(codec, "nesterov", False) is None else {}
        if self.leaves_momentum and momentum:
            return self._with(momentum=momentum, **form), 0.0
        applied = codec.absorbs_momentum
        if codec.looks_ahead and not applied:
            raise UserError(
                f"compression {self}: nesterov is a form of momentum, and there is none: leave nesterov out"
            )
        if applied and momentum not in (0.0, applied):
            raise UserError(
                f"compression {self} applies its momentum before encoding, but optimizer.momentum is {momentum}: "
                f"make them equal, or leave momentum out of the compression"
            )
        if codec.momentum_inside and momentum and not applied:
            raise UserError(
                f"compression {self}: optimizer.momentum {momentum} after decoding spoils training; leave momentum out "
                f"of the compression, which then takes the optimizer's, or set optimizer.momentum to 0"
            )
        return (self._with(**form), 0.0) if applied else (self, momentum)

    def decay_factor(self, momentum: float) -> float:
        """Return what weight decay is multiplied by where this momentum has left SGD for the codec.

        SGD's momentum m multiplies its decay, too, which adds up to 1 / (1 - m) times itself as weights change slowly.
        Signs (Bernstein et al. 2018) are decayed as they are.
        """
        return 1.0 if self.codec.direction else 1.0 / (1.0 - momentum)

    def _with(self, **settings: Any) -> Compression:
        try:
            return replace(self, codec=replace(self.codec, **settings))  # type: ignore[type-var]
        except ValueError as error:
            raise UserError(f"compression {self}: {error}") from error

    def __str__(self) -> str:
        coder = f"+{ENTROPY_CODER}" if self.entropy_coding else ""
        return f"{spec_of(self.codec.name, self.codec)}{coder}"


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
    codec: type[Codec] = CODECS.settings_class(name)
    return codec


def check(text: str) -> None:
    """Refuse a spec that names no codec or no setting of it, without importing torch.

    Raises:
        UserError: names the nearest that exists.
    """
    CODECS.check(_chain(text)[0])


def read(text: str) -> Compression:
    """Return what a spec describes.

    Example: `read("topk(0.01)+huffman")`.

    Raises:
        UserError: an unknown codec or setting, an impossible value, or a chain that cannot work; names what does.
    """
    first, *others = _chain(text)
    codec: Codec = CODECS.bind(first)
    if others and not codec.takes_entropy_coding:
        raise UserError(
            f"compression {text!r}: {codec.name} sends no symbols that +{ENTROPY_CODER} could shorten; "
            f"write {codec.name} alone, or qsgd+{ENTROPY_CODER}"
        )
    return Compression(codec, bool(others))


def build(text: str) -> Codec:
    """Build what a spec names, with error feedback and the worker's momentum around it where the codec needs them.

    Raises:
        UserError: as `read`.
    """
    return read(text).build()


def _chain(text: str) -> Sequence[Spec]:
    """Read a codec and perhaps the entropy coder after it.

    Raises:
        UserError: something else follows a codec, or nothing stands before the entropy coder.
    """
    first, *others = CODECS.chain(text)
    if first.name == ENTROPY_CODER:
        raise UserError(
            f"compression 'huffman' codes the symbols of another codec: write for example qsgd+{ENTROPY_CODER}"
        )
    for spec in others:
        if spec.name != ENTROPY_CODER:
            known = [*names(), ENTROPY_CODER]
            if spec.name not in known:
                raise unknown("compression", spec.name, known)
            raise UserError(f"compression {text!r}: only +{ENTROPY_CODER} can follow a codec; choose one of the others")
        if spec.args or spec.kwargs:
            raise UserError(f"compression {text!r}: {ENTROPY_CODER} takes no settings; write +{ENTROPY_CODER}")
    if len(others) > 1:
        raise UserError(f"compression {text!r}: one +{ENTROPY_CODER} is enough")
    return [first, *others]
