from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from echelon.core.own import code_mark


def _made(power: int) -> Callable[..., Any]:
    def error(outputs: Any, targets: Any) -> Any:
        return (outputs - targets) ** power  # a comment

    return error


def test_lambdas_are_told_apart_by_their_source_and_not_by_what_is_around_them() -> None:
    first = lambda outputs, targets: (outputs - targets).abs()  # noqa: E731
    (again,), other = (
        [lambda outputs,
                targets: (outputs - targets).abs()],
        lambda outputs, targets: (outputs - targets).square(),
    )  # fmt: skip
    assert code_mark(first).rpartition(" ")[2] == code_mark(again).rpartition(" ")[2]
    assert code_mark(first) != code_mark(other)
    both = (lambda a, b: a - b, lambda a, b: b - a)
    assert code_mark(both[0]) != code_mark(both[1])


def test_a_name_that_leads_to_code_is_all_that_tells_it() -> None:
    assert code_mark(nn.functional.cross_entropy) == ""
    assert code_mark(_made(2)).startswith("_made.<locals>.error (")
    assert code_mark(functools.partial(_made(2))) == code_mark(_made(2))


class _Error(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs()


def test_an_object_is_told_by_its_class() -> None:
    assert code_mark(_Error()) == code_mark(_Error()) != code_mark(nn.L1Loss())


def test_code_whose_source_is_gone_is_told_by_what_it_computes() -> None:
    spaces: list[dict[str, Any]] = [{}, {}, {}, {}]
    for space, text in zip(spaces, ("a - b * 2", "a - b * 2", "b - a * 2", "a - b * 3"), strict=True):
        exec(f"def error(a, b): return {text}", space)
    first, again, *others = (code_mark(space["error"]) for space in spaces)
    assert first == again and first not in others
