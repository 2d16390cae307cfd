"""What a model's family declares of its structure: its blocks, its forward chain, what tensor parallelism splits how.

A pattern is a module's dotted name in which `*`, `?` and `[1-4]` match inside one component and `**` any number of
components: `blocks.*.attn` matches `blocks.0.attn`, not `blocks.0.1.attn`; `**.qkv` matches both `qkv` and `a.b.qkv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from echelon.core.errors import UserError, unknown
from echelon.core.spec import parse_spec

STYLES = {
    "column": "a Linear's outputs are split; each rank computes its own",
    "row": "a Linear's inputs are split; the ranks' results are added",
    "vocabulary": "an Embedding's rows, or the outputs of a Linear that gives logits, are split; results are whole",
    "heads": "an attention module: its input is whole, its heads are split (column inside, row at its end)",
    "channels_out": "a convolution's output channels are split",
    "channels_in": "a convolution's input channels are split; the ranks' results are added",
    "channels": "BatchNorm, GroupNorm or a depthwise convolution on the local channels between the two",
    "sequence": "works on each token by itself (LayerNorm, dropout): under sequence parallelism on the local tokens",
    "shared": "whole parameters used on split heads or channels: the ranks' gradients are added",
    "replicate": "whole on every rank",
}


@dataclass(frozen=True)
class Hints:
    """The structure of one model family, as data. Everything is relative to the model's root.

    Attributes:
        blocks: patterns of the repeated blocks, in forward order: what is wrapped, recomputed and cut at.
        chain: the forward pass as steps, each the only user of the one before's output; None where it is no chain.
            A step is a pattern of modules (applied in their order), `:method`, a method of the root that takes and
            returns one tensor, or `=flatten` (from dim 1) or `=relu`.
        glue: for each `:method` step, the names of the root's children and own parameters that it uses.
        tensor_plan: patterns to styles; the last that matches a module counts.
        functions: what those `:method` steps do that the root has no method for: they take the root and the tensor.
        positions: names of parameters (1, T, D) with a row for each place in a text: weights of another length give the
            rows that both have.
    """

    blocks: tuple[str, ...] = ()
    chain: tuple[str, ...] | None = None
    glue: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    positions: tuple[str, ...] = ()

    def styles(self) -> dict[str, Style]:
        """Return the tensor plan with its styles read.

        Raises:
            UserError: a pattern or a style cannot be read.
        """
        return parse_tensor_plan(self.tensor_plan)


@dataclass(frozen=True)
class Style:
    """How one module is split. `parts` tensors of equal size are fused in a column layer's output (3 for a qkv)."""

    name: str
    parts: int = 1

    def __str__(self) -> str:
        return self.name if self.parts == 1 else f"{self.name}(parts={self.parts})"


def matches(pattern: str, name: str) -> bool:
    """Whether a module's dotted name fits a pattern; the root's, which is empty, fits none.

    >>> matches("blocks.*.attn", "blocks.11.attn"), matches("blocks.*", "blocks.0.attn"), matches("**.attn", "a.b.attn")
    (True, False, True)
    """
    return bool(name) and _match(pattern.split("."), name.split("."))


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that fit one of the patterns: pattern by pattern, each in the order of the names.

    >>> matching(["stem", "layer?.*"], ["layer1", "layer1.0", "layer1.1", "stem"])
    ['stem', 'layer1.0', 'layer1.1']
    """
    known = list(names)
    found: dict[str, None] = {}
    for pattern in patterns:
        found |= dict.fromkeys(name for name in known if matches(pattern, name))
    return list(found)


def parse_tensor_plan(plan: Mapping[str, str], field_name: str = "tensor_plan") -> dict[str, Style]:
    """Read patterns to styles, such as `{"blocks.*.attn.qkv": "column(parts=3)"}`.

    Raises:
        UserError: an empty pattern, a style that does not exist, or one with settings that it does not take.
    """
    return {_pattern(pattern, field_name): _style(pattern, style, field_name) for pattern, style in plan.items()}


def style_of(name: str, plan: Mapping[str, Style]) -> Style | None:
    """Return the style of the last pattern that fits the module's name."""
    return next((style for pattern, style in reversed(list(plan.items())) if matches(pattern, name)), None)


def _match(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _match(pattern[1:], name[1:])


def _pattern(pattern: object, field_name: str) -> str:
    if not isinstance(pattern, str) or not all(pattern.split(".")):
        raise UserError(f"{field_name}: {pattern!r} is no pattern of module names: write one such as blocks.*.mlp.fc1")
    return pattern


def _style(pattern: str, text: object, field_name: str) -> Style:
    where = f"{field_name}: {pattern}"
    if not isinstance(text, str):
        raise UserError(f"{where}: {text!r} is no style: write one of {', '.join(STYLES)}")
    spec = parse_spec(text)
    if spec.name not in STYLES:
        raise UserError(f"{where}: {unknown('style', spec.name, STYLES)}")
    values = [*spec.args, *(value for key, value in spec.kwargs if key == "parts")]
    if not values and not spec.kwargs:
        return Style(spec.name)
    if spec.name != "column" or len(values) != 1 or len(spec.kwargs) + len(spec.args) != 1:
        raise UserError(f"{where}: {text!r}: only column takes a setting, as column(parts=3) for a fused qkv")
    parts = values[0]
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise UserError(f"{where}: parts must be a whole number from 1, not {parts!r}")
    return Style(spec.name, parts)


def name_for_side(image_size: int) -> str:
    """Return the model that `auto` becomes for images of so many pixels, each of one class."""
    if image_size < 8:
        return "mlp"
    if image_size < 32:
        return "small_cnn"
    return "resnet20" if image_size <= 64 else "timm/resnet50"
