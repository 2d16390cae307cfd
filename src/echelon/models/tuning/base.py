"""What a kind of tuning says of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import ClassVar

from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import matches
from echelon.models.families import hints_for
from echelon.models.weights import head_names

Call = Callable[[nn.Module], object]
"""Runs a model's forward on inputs like those of its data."""


class TuningKind:
    """One kind of tuning: a subclass is a dataclass of its settings and says what it has to say.

    Names are those of the whole model's parameters.

    Attributes:
        trains: what it adds to what is trained: `weights` that may have been given, `new` parts alone, `adapters`, or
            `nothing`.
        begins: the epoch, counted from 0, from which on `thawed` counts.
    """

    trains: ClassVar[str] = "weights"

    @property
    def rebuilds(self) -> bool:
        """Return False: the model's modules stay its own."""
        return False

    def rebuild(self, model: nn.Module) -> None:
        """Change the model's modules for good, in place: before all else, and wherever a run's model is built again."""

    def prepare(self, model: nn.Module, call: Call | None = None) -> None:
        """Change the model's structure in place, before anything is chosen; what stays of it keeps its names.

        Args:
            call: runs the model's forward; None: there is nothing to call it with.
        """

    def plain(self, weights: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
        """Return weights, any shape, of the model as it was before `prepare`, from those that were trained.

        Args:
            model: the one before, or after.
        """
        return weights

    @property
    def begins(self) -> int:
        """Return 0: it holds from the start."""
        return 0

    def thawed(self, model: nn.Module) -> Set[str]:
        """Return the parameters that are trained from an epoch on, whatever others choose or freeze."""
        return frozenset()

    def trained(self, model: nn.Module) -> Set[str] | None:
        """Return the parameters that it has trained, beside the head; None: it does not choose any."""
        return None

    def frozen(self, model: nn.Module) -> Set[str]:
        """Return the parameters that stay as they are, whatever others choose."""
        return frozenset()

    def rates(self, model: nn.Module) -> Mapping[str, float]:
        """Return factors of the learning rate, by parameter; 1 for those left out."""
        return {}


_CONTAINERS = (nn.Sequential, nn.ModuleList)
_BRANCH = 2
_SIDE_BY_SIDE = 3  # an encoder and a decoder may be of one kind, and are no blocks


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of a model's repeated blocks in forward order.

    Those that its family declares, else its children that have parameters. One that holds a container of repeated
    blocks gives way to its own children, and so does the largest where it is a container. Repeated blocks stay whole:
    those in a container, and three or more of one kind side by side.
    """
    hints = hints_for(model)
    names = [name for name, _ in model.named_modules()]
    if hints is not None and hints.blocks:
        return [name for pattern in hints.blocks for name in names if matches(pattern, name)]
    children = _with_parameters(model, "")
    blocks = _blocks_in(model, "")
    while (name := _to_open(model, children, blocks)) is not None:
        module = model.get_submodule(name)
        inner = _with_parameters(module, f"{name}.")
        blocks |= _blocks_in(module, f"{name}.")
        at = children.index(name)
        children[at : at + 1] = inner
    head = head_names(model)
    behind = [name for name in children if all(each in head for each in _names_in(model, name))]
    return [name for name in children if name not in behind] or children


def _to_open(model: nn.Module, names: Sequence[str], blocks: Set[str]) -> str | None:
    """Return the first module that gives way to its children; None: all stay."""
    largest = max(names, key=lambda name: _size(model.get_submodule(name)), default="")
    for name in names:
        module = model.get_submodule(name)
        is_container = isinstance(module, _CONTAINERS) and bool(_with_parameters(module, ""))
        holds_blocks = any(_repeats(each) for each in module.modules())
        if (holds_blocks and (is_container or name not in blocks)) or (
            is_container and name == largest and name not in blocks
        ):
            return name
    return None


def _names_in(model: nn.Module, name: str) -> list[str]:
    return [f"{name}.{each}" for each, _ in model.get_submodule(name).named_parameters()]


def _repeats(module: nn.Module) -> bool:
    """Whether it is a container of blocks of one kind: not of layers in a row, as an MLP is."""
    blocks = [child for child in module.children() if _size(child)]
    of_one_kind = len(blocks) > 1 and len({type(block) for block in blocks}) == 1
    may_be_leaves = isinstance(module, nn.ModuleList)
    return (
        isinstance(module, _CONTAINERS) and of_one_kind and (may_be_leaves or any(True for _ in blocks[0].children()))
    )


def _blocks_in(module: nn.Module, prefix: str) -> set[str]:
    """Return the names of the children that are repeated blocks, and no towers of blocks side by side."""
    children = {f"{prefix}{name}": child for name, child in module.named_children() if _size(child)}
    if _repeats(module):
        return set(children)
    kinds = Counter(type(child) for child in children.values())
    return {n for n, child in children.items() if kinds[type(child)] >= _SIDE_BY_SIDE and not _is_tower(child)}


def _is_tower(module: nn.Module) -> bool:
    """Whether it holds a list of blocks, or three or more in a row: two in a row are a branch."""
    rows = [each for each in module.modules() if _repeats(each)]
    return any(isinstance(each, nn.ModuleList) or len(each) > _BRANCH for each in rows if isinstance(each, _CONTAINERS))


def _with_parameters(module: nn.Module, prefix: str) -> list[str]:
    return [prefix + name for name, child in module.named_children() if _size(child)]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def below(name: str, pattern: str) -> bool:
    """Whether a parameter is one that a pattern names, or lies in a module that it names.

    >>> below("blocks.0.attn.qkv.weight", "blocks.*"), below("head.weight", "blocks.*")
    (True, False)
    """
    parts = name.split(".")
    return any(matches(pattern, ".".join(parts[: i + 1])) for i in range(len(parts)))


def some(names: set[str], model: nn.Module, kind: str, what: str) -> set[str]:
    """Return the names of what a kind trains beside the head.

    Raises:
        UserError: there are none, so that the kind would be `head`.
    """
    if not names:
        raise UserError(f"--tune {kind}: {type(model).__name__} has no {what}; --tune head trains its head alone")
    return names


def matching(model: nn.Module, pattern: str, what: str) -> set[str]:
    """Return the names of parameters that patterns joined by `+` name, or that lie in modules that they name.

    Args:
        what: is said to match nothing.

    Raises:
        UserError: they name none.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {name for name in names for each in pattern.split("+") if below(name, each.strip())}
    if not found:
        tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
        raise UserError(f"--tune {what}: it matches nothing; {type(model).__name__} has {tops}")
    return found
