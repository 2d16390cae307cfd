"""Which module is split how: the family's hints, a run's own patterns over them, or a plan found from the structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.placement_types import Placement, Replicate

from echelon.core.adapters import SIDES, adapted_layer
from echelon.core.errors import UserError, nearest
from echelon.core.hints import Hints, Style, matches, matching, style_of
from echelon.parallel.tensor.inferred_plan import find_plan, reached_from
from echelon.parallel.tensor.layers import Split, adapter_split, drops, split_of

WHOLE = ("replicate", "sequence", "shared")
HOW = "write --tensor-plan with patterns of module names and their styles, such as blocks.*.fc1=column,blocks.*.fc2=row"


@dataclass(frozen=True)
class TensorPlan:
    """How a model is split over `tp` ranks.

    Attributes:
        styles: of the modules that have one, by the name that they have in the whole model.
        blocks: the blocks between whose first and last activations are split by tokens; empty without.
        found: it was found from the structure alone: compare the model's output with that before (`same_function`).
    """

    tp: int
    styles: Mapping[str, Style]
    blocks: tuple[str, ...] = ()
    found: bool = False

    def split(self, name: str, module: nn.Module) -> Split:
        """Return how one module is split; a side of an adapter follows its layer."""
        adapted = self.styles.get(adapted_layer(name))
        if adapted is not None:
            return adapter_split(name, module, adapted, self.tp)
        style = self.styles.get(name)
        return Split() if style is None else split_of(name, module, style, self.tp)

    def attention_around(self, name: str) -> str:
        """Return the name of the outermost attention module that a module is part of, whose heads are split."""
        parents = (name[:i] for i, letter in enumerate(name) if letter == ".")
        return next((each for each in parents if each in self.styles and self.styles[each].name == "heads"), "")

    def enters_by_layer(self, name: str, module: nn.Module) -> bool:
        """Whether attention's layers take its inputs as whole ones, and not it: where no family says that it has but
        one input, read by its column layers alone.

        Shared layers tell nobody whether they read what is whole or each head; norms read each head.
        """
        if not self.found or self.blocks or name not in self.styles or self.styles[name].name != "heads":
            return False
        shared = [m for path, m in module.named_modules() if self.styles.get(f"{name}.{path}") == Style("shared")]
        return not any(parameter.ndim > 1 for each in shared for parameter in each.parameters())

    def by_tokens(self, name: str) -> bool:
        """Whether a module stands where activations are split by tokens."""
        return any(name == block or name.startswith(f"{block}.") for block in self.blocks)


def plan_tensor(
    model: nn.Module, tp: int, hints: Hints | None, overrides: Mapping[str, Style], sequence_parallel: bool
) -> TensorPlan:
    """Decide how a whole model is split over `tp` ranks, and check that it can be. The model may be on meta.

    Raises:
        UserError: in words, with the module's name: `tp` does not divide it, a style does not fit it, a pattern of
            `overrides` names no module, there is no plan, or it cannot be run by tokens.
    """
    names = [name for name, _ in model.named_modules() if name]
    _check_patterns(overrides, names)
    declared, found = _declared(model, hints, overrides, tp)
    whole = {**declared, **overrides}
    styles = {name: style for name in names if (style := style_of(name, whole)) is not None}
    if all(style.name in WHOLE for style in styles.values()):
        raise UserError(f"tp={tp}: nothing of {type(model).__name__} is split by this plan: {HOW}")
    blocks = _token_blocks(names, hints, styles) if sequence_parallel else ()
    plan = TensorPlan(tp, styles, blocks, found)
    placements_of(model, plan)
    _check_heads(model, plan)
    _check_tokens(model, plan)
    _check_dropout(model, plan)
    return plan


def placements_of(model: nn.Module, plan: TensorPlan) -> dict[int, Placement]:
    """Return how each parameter is placed, by its id.

    Raises:
        UserError: a module cannot be split so, or a tied parameter would be split in two ways.
    """
    placements: dict[int, Placement] = {}
    holders: dict[int, str] = {}
    for name, module in model.named_modules():
        split = plan.split(name, module)
        if name not in plan.styles and any(child not in SIDES for child, _ in module.named_children()):
            continue  # a parent that holds what its layer uses, as BERT's head does the decoder's bias
        for leaf, parameter in module.named_parameters(recurse=False):
            placement = split.placements.get(leaf, Replicate())
            if placements.setdefault(id(parameter), placement) != placement:
                raise UserError(
                    f"tp={plan.tp}: {holders[id(parameter)]} and {name}.{leaf} are one tied parameter, which cannot be "
                    "split in two ways: give both modules the style vocabulary, or both replicate"
                )
            holders.setdefault(id(parameter), f"{name}.{leaf}")
    return placements


def _declared(
    model: nn.Module, hints: Hints | None, patterns: Mapping[str, Style], tp: int
) -> tuple[dict[str, Style], bool]:
    if hints is not None and hints.tensor_plan:
        return hints.styles(), False
    if patterns:
        return {}, True
    kind = type(model).__name__
    if hints is not None:
        raise UserError(f"tp={tp}: this {kind} has blocks of a kind that is not split: {HOW}")
    return find_plan(model, tp), True


def _check_patterns(patterns: Mapping[str, Style], names: list[str]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            shown = ", ".join(names[:6])
            raise UserError(
                f"--tensor-plan: no module's name fits {pattern}: {nearest(pattern, names)}the model has {shown}, ..."
            )


def _token_blocks(names: list[str], hints: Hints | None, styles: Mapping[str, Style]) -> tuple[str, ...]:
    blocks = tuple(matching(hints.blocks, names)) if hints is not None else ()
    if not blocks or not any(style.name == "sequence" for style in styles.values()):
        raise UserError(
            "sequence: the model's hints name no transformer blocks with layers that work token by token: "
            "leave sequence away"
        )
    return blocks


def _check_heads(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse layers inside split attention of which nobody said how they are split."""
    for name, module in model.named_modules():
        if (
            plan.attention_around(name)
            and name not in plan.styles
            and not adapted_layer(name)
            and list(module.parameters(recurse=False))
        ):
            raise UserError(
                f"tp={plan.tp}: {name} ({type(module).__name__}) is inside attention whose heads are split, and has no "
                f"style: write --tensor-plan {name}=shared where it works on each head by itself"
            )


def _check_tokens(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse modules inside the blocks of which nobody said that they may see a part of the tokens."""
    for name, module in model.named_modules():
        if not plan.by_tokens(name) or plan.attention_around(name) or name in plan.styles or adapted_layer(name):
            continue
        if list(module.parameters(recurse=False)):
            raise UserError(
                f"sequence: {name} ({type(module).__name__}) would see a part of the tokens: "
                f"if it works on each by itself, write --tensor-plan {name}=sequence; else leave sequence away"
            )


def _check_dropout(model: nn.Module, plan: TensorPlan) -> None:
    """Refuse dropout between a column layer whose outputs do not divide and its row layer: ranks would draw more random
    numbers or fewer, and later masks, of what is whole, would differ. Where no trace says what stands between, dropout
    beside the column layer is refused.
    """
    modules = dict(model.named_modules())
    for name, style in plan.styles.items():
        outputs, parent = getattr(modules[name], "out_features", 0), name.rpartition(".")[0]
        if style.name != "column" or outputs % plan.tp == 0:
            continue
        prefix, children = f"{parent}." if parent else "", dict(modules[parent].named_children())
        dropping = [child for child, each in children.items() if drops(each)]
        rows = {child for child in children if plan.styles.get(prefix + child) == Style("row")}
        reached = reached_from(modules[parent], name.removeprefix(prefix), rows) if dropping else set[str]()
        for child in dropping:
            if reached is None or child in reached:
                raise UserError(
                    f"tp={plan.tp} does not divide the {outputs} outputs of {name}, so that the ranks' random numbers "
                    f"would part at {prefix}{child}: take a tp that does, or set its dropout to 0"
                )
