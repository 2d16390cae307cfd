"""Python stacks, of threads and of errors: what a thread is in, whether it waits, and where a user's code raised."""

from __future__ import annotations

import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x([0-9a-f]+)|Stack \(most recent)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

_LIBRARY = sysconfig.get_paths()["stdlib"]
_PACKAGE = str(Path(__file__).parents[1])
_CARRIERS = (  # functions that others wait or compute in: who called them tells more
    f"{_LIBRARY}/threading.py", f"{_LIBRARY}/queue.py", f"{_LIBRARY}/selectors.py", f"{_LIBRARY}/contextlib.py",
    f"{_LIBRARY}/multiprocessing/", f"{_LIBRARY}/concurrent/", "/torch/_ops.py", "/torch/utils/_contextlib.py",
    "/torch/autograd/function.py", "/torch/futures/",
)  # fmt: skip
_WAITING = (
    "/torch/distributed/", "/zmq/", f"{_PACKAGE}/collectives/", f"{_PACKAGE}/messages/", f"{_PACKAGE}/ps/",
    f"{_PACKAGE}/sync/averaging/exchange.py", f"{_PACKAGE}/trainer/window.py",
    f"{_PACKAGE}/trainer/membership.py", f"{_PACKAGE}/trainer/rescue.py", f"{_PACKAGE}/trainer/second_copy.py",
    f"{_PACKAGE}/parallel/pipeline/torch_stage.py", f"{_PACKAGE}/parallel/tensor/comm.py",
    f"{_PACKAGE}/parallel/shard_gather.py",
)  # fmt: skip
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_COMMAND = "/bin/echelon"  # from which processes were forked
_NOT_OF_USERS = (_LIBRARY, _PACKAGE, "/site-packages/", "/dist-packages/", "<frozen", "<string>")


@dataclass(frozen=True)
class StackFrame:
    """A call: its file, line and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """The calls of a thread, the innermost first."""

    frames: tuple[StackFrame, ...]

    def __str__(self) -> str:
        return "\n".join(f'  File "{f.file}", line {f.line} in {f.function}' for f in self.frames)

    def shortened(self, innermost: int) -> Stack:
        """Return the innermost calls, and of the outer ones those that say whether it waits, and for what."""
        inner, outer = self.frames[:innermost], self.frames[innermost:]
        tells = (self.telling, self.of_user)
        told = (f for f in outer if any(f is frame for frame in tells) or f.file.endswith(_COLLECTIVES))
        return Stack((*inner, *told))

    @property
    def telling(self) -> StackFrame | None:
        """The innermost call that is not of the machinery that everything waits or computes in."""
        return next((f for f in self.frames if not _is_in(f, _CARRIERS)), None)

    @property
    def of_user(self) -> StackFrame | None:
        """The innermost call in code that is neither Python's, nor a package's, nor Echelon's, nor its command."""
        known = (f for f in self.frames if not (_is_in(f, _NOT_OF_USERS) or f.file.endswith(_COMMAND)))
        return next(known, None)

    @property
    def waits(self) -> bool:
        """Whether the thread is in a call that waits for other processes, such as a collective."""
        return self.telling is not None and _is_in(self.telling, _WAITING)

    @property
    def is_in_user_code(self) -> bool:
        """Whether its innermost telling call is the user's."""
        return self.telling is not None and self.telling == self.of_user

    @property
    def collective(self) -> str:
        """The name of the collective that it is in, such as `all_reduce`; empty: none by name."""
        names = [f.function for f in self.frames if f.file.endswith(_COLLECTIVES)]
        return next((name for name in reversed(names) if name not in ("wrapper", "_wrapper")), "")


def _is_in(frame: StackFrame, places: tuple[str, ...]) -> bool:
    return any(place in frame.file for place in places)


def user_frame(error: BaseException) -> StackFrame | None:
    """Return the innermost call of the user's code that an error, or one that it followed from, came through."""
    frames = [StackFrame(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    cause = error.__cause__
    return Stack(tuple(reversed(frames))).of_user or (user_frame(cause) if cause is not None else None)


def circumstances(error: BaseException) -> str:
    """Return what was noted of an error, and where the user's own code raised it; empty: neither."""
    frame = user_frame(error)
    return ", ".join([*getattr(error, "__notes__", []), *([f"{frame.file}:{frame.line}"] if frame else [])])


def stack_of(text: str, thread: int) -> Stack | None:
    """Return the stack of a thread (its identity) in the last dump that a text has whole; None: it has none.

    A dump of one thread, the one that took the signal, names none: it counts as the wanted one.

    >>> text = 'Current thread 0x1f (most recent call first):\\n  File "a.py", line 3 in f\\n'
    >>> print(stack_of(text, 0x1F).frames[0])
    a.py:3 in f
    """
    frames: list[StackFrame] | None = None
    for line in text.splitlines():
        if match := _THREAD.match(line):
            is_wanted = match[1] is None or int(match[1], 16) == thread
            frames = [] if is_wanted else frames
        elif frames is not None and is_wanted and (match := _FRAME.match(line)):
            frames.append(StackFrame(match[1], int(match[2]), match[3]))
    return Stack(tuple(frames)) if frames else None
