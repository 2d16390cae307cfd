"""What an optimizer is, by its name: which ones update element by element, and which ones are SGD."""

from __future__ import annotations

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


def is_elementwise(name: str) -> bool:
    """Whether an optimizer can update any piece of a tensor by itself; others look at norms or products of tensors."""
    return name.lower() in ELEMENTWISE


def is_split_on_servers(name: str) -> bool:
    """Whether the keys of a parameter server split tensors that this optimizer updates; else each is of one server."""
    return name.lower() in SPLIT_ON_SERVERS


def is_sgd(name: str) -> bool:
    """Whether an optimizer is SGD, with or without a momentum."""
    return name.lower() in SGD_FAMILY


def is_nesterov(name: str) -> bool:
    """Whether an optimizer's momentum, where it has one, is Nesterov's."""
    return name.lower() in NESTEROV
