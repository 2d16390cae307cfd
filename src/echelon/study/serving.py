"""The live page: built for a folder, served in this process, or in a child of a command for as long as that goes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from echelon.core.errors import UserError
from echelon.core.json_values import finite_object
from echelon.study.file import is_study
from echelon.study.watch import StudyWatch

if TYPE_CHECKING:
    from echelon.reporting.live.server import Site

_LINGER_S = 1.5  # so that a page that is open sees the end
_END_S = 5.0
_NICENESS = 10


def site_of(path: Path) -> Site:
    """Return the site of a folder: of a study where it holds one, else of a run.

    Raises:
        UserError: a study's description cannot be read.
    """
    from echelon.reporting.live.server import Site

    if not is_study(path):
        return Site(path.resolve().name, path)
    watch = StudyWatch(path)
    return Site(path.resolve().name, path, lambda: finite_object(asdict(watch.overview())), watch.folder_of)


def serve_here(path: Path, port: int) -> None:
    """Serve a folder's page until ctrl-c, and print its address.

    Raises:
        UserError: the port cannot be had.
    """
    from echelon.reporting.live.server import address, build_app, listen, new_token, serve

    site, token = site_of(path), new_token()
    with listen(port) as listener:
        print(f"live: {address(listener, token)}  (ctrl-c ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            serve(build_app(site, token), listener)


@dataclass
class _Child:
    """Process that serves; it ends when its standard input does, so it cannot outlive its parent."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]


@contextmanager
def live_page_of(path: Path, wanted: bool) -> Iterator[None]:
    """Serve a folder's page for as long as the block takes, if wanted; an error of it is one line on stderr."""
    child = _begin(path) if wanted else None
    try:
        yield
    finally:
        if child is not None:
            _end(child)


def _begin(path: Path) -> _Child | None:
    from echelon.launch.plan import is_worker
    from echelon.reporting.live.server import address, listen, new_token

    if is_worker():
        if os.environ["RANK"] == "0":
            _say("no live page under a launcher of one's own; `echelon watch RUN --serve` shows the run")
        return None
    token = new_token()
    try:
        with listen() as listener:
            child = _spawn(path, listener)
            assert child.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is gone already: `_end` says why
                child.process.stdin.write(token.encode() + b"\n")
                child.process.stdin.flush()
            print(f"live: {address(listener, token)}", flush=True)
            return child
    except (OSError, UserError) as error:
        _say(f"no live page ({error}); the run goes on without it")
        return None


def _spawn(path: Path, listener: socket.socket) -> _Child:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - read and closed by `_end`
    number = listener.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon.study.serving", str(path.resolve()), str(number)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=(number,), start_new_session=True,
    )  # fmt: skip
    return _Child(process, errors)


def _end(child: _Child) -> None:
    """Ask the child to end, wait for it, and report where it had ended by itself."""
    failed = child.process.poll()
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone already: said below
        child.process.stdin.close()
    try:
        child.process.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.process.kill()
        child.process.wait(_END_S)
    with child.errors as errors:
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if failed is not None:
        _say(f"the live page ended before the run did: {lines[-1] if lines else f'exit code {failed}'}")


def _say(message: str) -> None:
    print(f"echelon: {message}", file=sys.stderr, flush=True)


def _serve_as_child(path: Path, number: int) -> None:
    """Serve on an inherited socket until standard input ends."""
    from echelon.reporting.live.server import build_app, make_server

    os.nice(_NICENESS)  # the run comes first
    token = sys.stdin.readline().strip()
    app = build_app(site_of(path), token)
    server = make_server(app)

    def end_with_parent() -> None:
        """Stop serving when standard input ends; an open page sees the end first."""
        sys.stdin.read()
        if app.heard(_LINGER_S):
            time.sleep(_LINGER_S)
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True).start()
    with socket.socket(fileno=number) as listener:
        server.run(sockets=[listener])


if __name__ == "__main__":
    _serve_as_child(Path(sys.argv[1]), int(sys.argv[2]))
