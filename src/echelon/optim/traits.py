"""What an optimizer of timm's is, by its name: what its update depends on, and which ones are SGD."""

from __future__ import annotations

from enum import IntEnum

NESTEROV = ("sgd", "nesterov")
SGD_FAMILY = (*NESTEROV, "momentum")
ELEMENTWISE = frozenset(
    (
        *SGD_FAMILY,
        *("adam", "adamw", "nadam", "nadamw", "radam", "adamax", "adadelta", "adagrad", "rmsprop", "rmsproptf"),
        *("lion", "adabelief", "radabelief", "adan", "adanw", "adopt", "adoptw", "laprop", "madgrad", "madgradw"),
    )
)
"""Optimizers whose update of an element depends on that element's gradients alone: right on any piece of a tensor."""


SPLIT_ON_SERVERS = frozenset((*SGD_FAMILY, "adam", "adamw", "nadam", "nadamw", "lion", "rmsprop", "adagrad"))
"""Elementwise optimizers whose tensors a parameter server's keys split. A run's keys are in its checkpoints: with a
longer list, runs of the others that were begun before it would not resume.
"""


class Reach(IntEnum):
    """What the update of an element depends on: its own gradients, its tensor's, or the whole model's."""

    ELEMENT = 0
    TENSOR = 1
    MODEL = 2


def reach_of(name: str) -> Reach:
    """Return the reach of an optimizer; those with more than an element's look at norms or products of tensors."""
    if name.lower() in ELEMENTWISE:
        return Reach.ELEMENT
    return Reach.MODEL if "lamb" in name.lower() else Reach.TENSOR


def draws_numbers(name: str) -> bool:
    """Whether steps of an optimizer draw random numbers, so that replicas of a model would part.

    >>> draws_numbers("kronw"), draws_numbers("adamw")
    (True, False)
    """
    return name.lower().startswith("kron")


_MOVES_BY_RATE = ("adam", "lion")
"""In names of optimizers that divide a gradient by its size, or take its sign alone."""
_OF_ROWS = "sparse_adam"
ON_ROWS = (*SGD_FAMILY, "adagrad", _OF_ROWS)
"""Optimizers that update the touched rows of a sparse table alone; SGD's without momentum."""


def is_split_on_servers(name: str) -> bool:
    """Whether the keys of a parameter server split tensors that this optimizer updates; else each is of one server."""
    return name.lower() in SPLIT_ON_SERVERS


def moves_by_rate(name: str) -> bool:
    """Whether each step moves a number by about the learning rate, whatever its gradient's size."""
    return ":" not in name and any(kind in name.lower() for kind in _MOVES_BY_RATE)


_NORMALISE = ("ada", "adopt", "lamb", "laprop", "lion", "madgrad", "mars", "muon", "novograd", "rmsprop")
"""In names of optimizers, and of their classes, whose steps hardly depend on the size of gradients."""


def normalises(name: str) -> bool:
    """Whether an optimizer divides a gradient by its size, its mean square's root or its norm, or takes its sign.

    >>> normalises("adamw"), normalises("RMSprop"), normalises("sgd")
    (True, True, False)
    """
    return any(kind in name.rpartition(":")[2].lower() for kind in _NORMALISE)


def least_state(name: str, momentum: float) -> int:
    """Return how many numbers an optimizer keeps for each one that it trains, at least."""
    return 2 if "adam" in name.lower() else int(momentum > 0)


def dense_name(name: str) -> str:
    """Return the optimizer that does with whole tensors what the one of sparse tables does with rows.

    >>> dense_name("sparse_adam"), dense_name("lion")
    ('adam', 'lion')
    """
    return "adam" if name.lower() == _OF_ROWS else name


def is_sgd(name: str) -> bool:
    """Whether an optimizer is SGD, with or without a momentum."""
    return name.lower() in SGD_FAMILY


def is_nesterov(name: str) -> bool:
    """Whether an optimizer's momentum, where it has one, is Nesterov's."""
    return name.lower() in NESTEROV
