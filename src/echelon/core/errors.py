"""Errors that a user can cause, said in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2
STOPPED_EXIT_CODE = 3  # of a process that stopped after a checkpoint, as it was asked to
LEFT_EXIT_CODE = 4  # of a process that left a run which goes on, as it was asked to
RESCUED_EXIT_CODE = 5  # of a process that has saved what it and others had when one died: all are started again
LEFT = "left"  # how a run has ended for such a process, and for a machine without any other
RESCUED = "rescued"


class UserError(Exception):
    """The user's input cannot be used: names the file or field, and the fix.

    The command line prints it as one line and exits with code 2; a worker that raises it is not restarted.
    """


class JobFailed(Exception):
    """A run's processes cannot go on: as the message says, or, where it is empty, for the death that was told last."""


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Let a refusal name the setting that it is about, where what refuses does not know it.

    >>> with naming("--sync"):
    ...     raise UserError("cannot read spec ''")
    Traceback (most recent call last):
    echelon.core.errors.UserError: --sync: cannot read spec ''
    """
    try:
        yield
    except UserError as error:
        if setting in str(error):
            raise
        raise UserError(f"{setting}: {error}") from error.__cause__  # the same refusal, told once


def shown(text: str, most: int = 80) -> str:
    """Return what a user wrote, cut where it would fill more than a line.

    >>> shown("a" * 7, most=5)
    'aaaaa...'
    """
    return text if len(text) <= most else f"{text[:most]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean X? ` for the closest known word, or an empty string.

    >>> nearest("resnt20", ["resnet20", "mlp"])
    'did you mean resnet20? '
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {matches[0]}? " if matches else ""


def unknown(
    kind: str, word: str, known: Iterable[str], forms: Sequence[str] = (), may_be_object: bool = False
) -> UserError:
    """Build the refusal of an unknown name: the nearest known one, then what exists.

    Args:
        forms: how other names are written, such as `module:function`.
        may_be_object: a run's description has the name of the class where the caller gave an object.
    """
    names = sorted(known)
    hint = nearest(word, names) or nearest(word.lower(), names)  # CIFAR-10 is meant for cifar10
    if may_be_object and word.lower() not in names and re.fullmatch(r"[A-Z]\w*", word):
        again = f"echelon.evaluate(RUN, {kind}=..., ...), or resume, export or predict"
        hint += f"if that was an object given from Python, give it again as {kind}=... from Python: {again}; "
    listed = [*names, *forms[:-1], *(f"or {form}" for form in forms[-1:])]
    return UserError(f"unknown {kind} {word!r}: {hint}known: {', '.join(listed)}")
