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


ON_ROWS = (*SGD_FAMILY, "adagrad", "sparse_adam")
"""Optimizers that update the touched rows of a sparse table alone; SGD's without momentum."""


def is_split_on_servers(name: str) -> bool:
    """Whether the keys of a parameter server split tensors that this optimizer updates; else each is of one server."""
    return name.lower() in SPLIT_ON_SERVERS


def is_sgd(name: str) -> bool:
    """Whether an optimizer is SGD, with or without a momentum."""
    return name.lower() in SGD_FAMILY


def is_nesterov(name: str) -> bool:
    """Whether an optimizer's momentum, where it has one, is Nesterov's."""
    return name.lower() in NESTEROV
