"""Standard output that outlives its reader: a terminal that was closed, or a pipe's other end, ends no run."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
import textwrap
from typing import Any, TextIO

_GONE = (errno.EIO, errno.EPIPE)  # of a terminal, of a pipe
_TOGETHER = re.compile(
    r"(?<=\w)\([^()]{0,60}\)"  # a spec
    r"|`[^`]{0,76}`"  # a command
    r"|(?<=  )[a-z](?:[^ ]| (?! )){0,40} [\d.,]+(?=  |$)"  # an item of a line of numbers: evaluation top-1 0.9833
    r"|\d (?:[kMG]?B|[kMG]bit|m?s)\b(?:/s)?"  # a number and its unit
    r"|\w+ \d+%"  # a share
    r"|\[of step time: \w+ \d+%",
)
_NOBODY_READS = b"echelon: nobody reads standard output any more; what is shown goes nowhere\n"


class LastingFile(io.FileIO):
    """A descriptor to write to; once nobody reads there any more, what is written goes nowhere."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Write bytes; returns how many were."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self.fileno() == 1:
            LastingFile(2).write(_NOBODY_READS)  # not through sys.stderr: a live display sends that here
        return len(data)


def outlive_readers() -> None:
    """Let standard output and standard error of this process outlive who reads them."""
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def print_words(sentence: str) -> None:
    """Print a sentence: on a terminal broken at words, never within the brackets of a spec; else as one line."""
    if sys.stdout.isatty():
        sentence = broken_at_words(sentence, shutil.get_terminal_size().columns)
    print(sentence)


def broken_at_words(sentence: str, columns: int) -> str:
    """Return a sentence in lines of at most so many characters; what is longer by itself stays whole.

    >>> broken_at_words("local(period=8, overlap=2) saves 27%", 20)
    'local(period=8, overlap=2)\\nsaves 27%'
    >>> broken_at_words("saves 27% (computed from the record)", 24)
    'saves 27% (computed from\\nthe record)'
    >>> broken_at_words("Ctrl-C stops it, `echelon resume runs/a` continues it after 26.3 ms", 36)
    'Ctrl-C stops it,\\n`echelon resume runs/a` continues it\\nafter 26.3 ms'
    >>> broken_at_words("epoch 1/4  evaluation top-1 0.73  [of step time: data 2%]", 22)
    'epoch 1/4\\nevaluation top-1 0.73\\n[of step time: data 2%]'
    """
    bound = _TOGETHER.sub(lambda found: found[0].replace(" ", "\u00a0"), sentence)
    lines = textwrap.wrap(bound, columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\u00a0", " ")


def _lasting(stream: TextIO, fd: int) -> TextIO:
    """Return a stream of the same form; one that was closed before, or replaced, as it is."""
    if stream is None or not isinstance(stream, io.TextIOWrapper) or _descriptor(stream) != fd:
        return stream
    stream.flush()
    buffered = io.BufferedWriter(LastingFile(fd))
    return io.TextIOWrapper(
        buffered, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=fd == 2
    )


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor that a stream writes to; None for one in memory, such as a notebook's."""
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None
