"""What goes between this machine and a host without a common disk: the code, the run's folder, and what it becomes.

Files travel as tar through ssh. What comes back is written file by file: only plain files, only below the run's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.launch.places.cluster import MIRRORED_FILE, PLACE_FOLDER, PlaceSilent

_BEGUN = "echelon-begins-here"
SAY_BEGUN = f"echo {_BEGUN}"
"""Begins a script for a host: what shells print when they start comes before it (`answer_of`)."""
_NO_COMMANDS = "it runs no commands given over ssh"
TRANSFER_S = 24 * 3600.0  # what breaks off is noticed by ssh itself, within a quarter of a minute
_CHECKPOINTS = "checkpoints"
_TOLD_BY = "checkpoints/*/manifest.sha256 record*.jsonl"
_LOGS = "logs/"
_EXIT = f"{PLACE_FOLDER}/exit"
_OF_PLACE = {_EXIT, f"{PLACE_FOLDER}/starts"}  # what the hosts write of it
_NOT_BROUGHT = (PLACE_FOLDER, "machines")
_SMALL: tuple[str, ...] = ("config.yaml", "launch.json", PLACE_FOLDER, "machines")


def answer_of(text: str, host: str) -> str:
    """Return what a script printed that began with `SAY_BEGUN`, without what the host's shell printed before it.

    Raises:
        UserError: the script did not begin.
    """
    before, begun, answer = text.partition(f"{_BEGUN}\n")
    if not begun:
        greeting = f": {' '.join(before.split())}" if before.strip() else ""
        raise UserError(f"{host}: {_NO_COMMANDS}{greeting}")
    return answer


def base_there(folder: str, run: Path) -> PurePosixPath:
    """Return the folder on a host for a run of this machine: no other run's, of whatever machine, has the same."""
    whose = f"{socket.gethostname()}:{run.absolute()}"
    return PurePosixPath(folder) / f"{run.name}-{hashlib.sha256(whose.encode()).hexdigest()[:8]}"


def working_files(folder: Path, run: Path) -> list[str]:
    """Return the files of the working folder that .gitignore does not name, but for runs.

    Raises:
        UserError: there is no git to read it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode:  # no repository: the same rules without one
                environment = {**os.environ, "GIT_DIR": scratch, "GIT_WORK_TREE": str(folder)}
                subprocess.run(["git", "init", "-q"], env=environment, capture_output=True, check=True)
                done = subprocess.run(command, env=environment, capture_output=True, check=True)
        except FileNotFoundError:
            raise UserError("git reads .gitignore, and is not there: install it, or give code=false") from None
        except subprocess.CalledProcessError as error:
            raise UserError(f"git: {' '.join(os.fsdecode(error.stderr).split())}") from None
    names = sorted(set(filter(None, os.fsdecode(done.stdout).split("\0"))))
    own = os.path.relpath(run, folder)
    left_out = ("runs/", f"{own}/")
    found = []
    for name in (each.rstrip("/") for each in names if not each.startswith(left_out)):
        if name in ("", "."):
            continue
        path = folder / name
        if (path / ".git").exists() and not path.is_symlink():  # a submodule, or a repository within
            found += [f"{name}/{inner}" for inner in working_files(path, run)]
        elif path.is_file() or path.is_symlink():  # a link to a folder travels as a link
            found.append(name)
    return found


def send(ssh: Sequence[str], folder: Path, files: Sequence[str], there: PurePosixPath) -> None:
    """Make a folder of a host the same as these files of a folder here.

    Raises:
        PlaceSilent: the host does not answer.
        UserError: it cannot take them.
    """
    where = shlex.quote(str(there))
    script = f"rm -rf {where} && mkdir -p {where} && tar -xf - -C {where}"
    _send(ssh, folder, files, script)


def send_run(ssh: Sequence[str], run: Path, there: PurePosixPath, is_first: bool, is_new: bool = True) -> None:
    """Send a run's folder to a host: what a start needs, to the first one all of it where it has something else.

    Args:
        is_new: what is here is the newest there is; else the first host's own is, where it has any.

    Raises:
        PlaceSilent: the host does not answer.
        UserError: it cannot take it.
    """
    where = shlex.quote(str(there))
    if is_first:
        asked = f"cd {where} && {{ sha256sum config.yaml {_TOLD_BY} 2>/dev/null; }}"
        told = [line.split(None, 1) for line in _ask(ssh, f"{asked}; true").splitlines()]
        has = {name: sha256 for sha256, name in told}
        is_first = has.pop("config.yaml", None) is None or (is_new and has != _sums(run))
    names = _SMALL
    if is_first:
        unseen = {name for name in has if name.startswith(_CHECKPOINTS)} - _sums(run).keys()
        aside = f"{there}-{time.strftime('%Y%m%d-%H%M%S')}"
        if unseen:  # they could not be brought before
            print(f"echelon: the run's folder there has checkpoints that are not here: kept as {aside}", flush=True)
        _ask(ssh, f"mv {where} {shlex.quote(aside)}" if unseen else f"rm -rf {where}")
        names = tuple(path.name for path in run.iterdir() if not _is_hidden(path.name) and path.name != "logs")
    files = [file for name in names for file in _files_below(run / name)]
    relative = [str(file.relative_to(run)) for file in files if file.name != "exit"]
    script = f"mkdir -p {where} && chmod 700 {where} && rm -f {where}/{PLACE_FOLDER}/exit && tar -xf - -C {where}"
    _send(ssh, run, relative, script)


def _sums(run: Path) -> dict[str, str]:
    """Return SHA-256 of the files that tell how far a run is, by name."""
    files = [file for pattern in _TOLD_BY.split() for file in run.glob(pattern)]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _files_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    yield from sorted(file for file in path.rglob("*") if file.is_file())


def bring_run(ssh: Sequence[str], there: str, run: Path) -> None:
    """Bring what is new in a run's folder on a host: checkpoints whole, then everything else.

    Once all is here that a run left which has ended there, the host is not asked again.

    Raises:
        PlaceSilent: the host does not answer.
        UserError: it cannot give it.
    """
    before = Brought.read(run, 0)
    if before.whole and (run / _EXIT).exists():
        return
    found = _found(ssh, there)
    if not found:
        return
    now = _bring_new(ssh, there, run, found, before.files)
    after = Brought(now, whole=_EXIT in now and now == before.files)
    if after != before:
        after.write(run, 0)
    kept = {name.split("/")[1] for name in found if name.startswith(f"{_CHECKPOINTS}/")}
    for folder in (run / _CHECKPOINTS).glob("*"):
        if kept and folder.name not in kept and not folder.name.startswith("."):
            shutil.rmtree(folder, ignore_errors=True)


def bring_logs(ssh: Sequence[str], there: str, run: Path, number: int) -> None:
    """Bring what is new in a run's logs on a host that is not the first one, where that one has none of the name since.

    Raises:
        PlaceSilent: the host does not answer.
        UserError: it cannot give it.
    """
    firsts = {name: float(state.split()[1]) for name, state in Brought.read(run, 0).files.items()}
    found = {
        name: state
        for name, state in _found(ssh, there).items()
        if name.startswith(_LOGS) and firsts.get(name, 0.0) < float(state.split()[1])
    }
    before = Brought.read(run, number)
    after = Brought(_bring_new(ssh, there, run, found, before.files))
    if after != before:
        after.write(run, number)


@dataclass(frozen=True)
class Brought:
    """What was brought from a host: noted in the run's folder here.

    Attributes:
        files: size and time of each, as the host had it then.
        whole: it has ended there, and nothing was new after that was seen.
    """

    files: Mapping[str, str]
    whole: bool = False

    @classmethod
    def read(cls, run: Path, number: int) -> Brought:
        """Read what is noted of a host by its number; nothing where that cannot be read."""
        try:
            noted = json.loads((run / _state_file(number)).read_text())
            return cls(dict(noted["files"]), bool(noted["whole"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls({})

    def write(self, run: Path, number: int) -> None:
        """Note it."""
        write_atomic(run / _state_file(number), json.dumps({"files": dict(self.files), "whole": self.whole}))


def _state_file(number: int) -> str:
    return f".brought-{number}" if number else ".brought"


def _found(ssh: Sequence[str], there: str) -> dict[str, str]:
    """Return size and time of each file of a run's folder on a host that may be brought."""
    listing = _ask(ssh, f"cd {shlex.quote(there)} 2>/dev/null && find . -type f -printf '%P\\t%s\\t%T@\\0'; true")
    return {name: f"{size} {time}" for name, size, time in _listed(listing)}


def _bring_new(
    ssh: Sequence[str], there: str, run: Path, found: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Bring those of the files found on a host that are other than known; returns what is known then."""
    new = [name for name, state in found.items() if known.get(name) != state or not (run / name).exists()]
    came: list[str] = []
    if new:
        # 1: a file changed while it was read, as a record does that goes on: it is brought again the next time
        script = f"cd {shlex.quote(there)} && {{ tar --ignore-failed-read -cf - --null -T - || [ $? -eq 1 ]; }}"
        with tempfile.TemporaryDirectory(dir=run, prefix=".bringing-") as scratch, _connection(ssh, script) as child:
            assert child.stdin is not None and child.stdout is not None
            writer = threading.Thread(target=_write_names, args=(child.stdin, new), daemon=True)
            writer.start()
            came = _extract(child.stdout, Path(scratch), set(new))
            writer.join()
            _place(Path(scratch), run, came, found)
    now = {**known, **{name: found[name] for name in came}}
    return {name: state for name, state in now.items() if name in found}


def _is_hidden(name: str) -> bool:
    return name.startswith(".") and name != MIRRORED_FILE


def _listed(text: str) -> Iterator[tuple[str, str, str]]:
    for line in filter(None, text.split("\0")):
        name, size, time = line.rsplit("\t", 2)
        parts = PurePosixPath(name).parts
        if name in _OF_PLACE or not (parts[0] in _NOT_BROUGHT or any(map(_is_hidden, parts))):
            yield name, size, time


def _write_names(pipe: IO[bytes], names: Sequence[str]) -> None:
    try:
        with pipe:
            pipe.write(b"".join(os.fsencode(name) + b"\0" for name in names))
    except BrokenPipeError:  # said by who reads
        return


def _extract(stream: IO[bytes], folder: Path, wanted: set[str]) -> list[str]:
    """Write the wanted plain files of an archive below a folder; returns their names."""
    came = []
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() and member.name in wanted else None
                if content is None:
                    continue
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
                came.append(member.name)
    except tarfile.TarError as error:
        raise PlaceSilent(f"what a host sent broke off: {error}") from None
    return came


def _place(scratch: Path, run: Path, came: list[str], remote: Mapping[str, str]) -> None:
    """Move what came into the run's folder: checkpoints that are whole at once, then files, the record among them."""
    of_checkpoints = [name for name in came if name.startswith(f"{_CHECKPOINTS}/")]
    for step in sorted({name.split("/")[1] for name in of_checkpoints}):
        wanted = {name for name in remote if name.startswith(f"{_CHECKPOINTS}/{step}/")}
        target = run / _CHECKPOINTS / step
        if wanted <= set(came):
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            (scratch / _CHECKPOINTS / step).rename(target)
    for name in came:
        if name not in of_checkpoints:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).replace(run / name)


def _send(ssh: Sequence[str], folder: Path, files: Sequence[str], script: str) -> None:
    with _connection(ssh, script) as child:
        assert child.stdin is not None
        try:
            with tarfile.open(fileobj=child.stdin, mode="w|") as archive:
                for name in files:
                    archive.add(folder / name, name, recursive=False)
            child.stdin.close()
        except BrokenPipeError:  # said by how the connection ends
            return
        except OSError as error:
            why = f"cannot be sent ({error.strerror})"
            raise UserError(f"{error.filename or folder} {why}: make it readable, or let .gitignore name it") from None


def _ask(ssh: Sequence[str], script: str) -> str:
    with _connection(ssh, script) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.close()
        return os.fsdecode(child.stdout.read())  # names of files, which may be of any bytes


@contextmanager
def _connection(ssh: Sequence[str], script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script on a host with its two ends open.

    Raises:
        PlaceSilent: the host does not answer, or not in time.
        UserError: the script fails, in its words.
    """
    with tempfile.TemporaryFile() as words:
        child = subprocess.Popen(
            [*ssh, f"sh -c {shlex.quote(f'{SAY_BEGUN}; {script}')}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, start_new_session=True,
        )  # fmt: skip
        limit = threading.Timer(TRANSFER_S, child.kill)
        limit.start()
        try:
            assert child.stdout is not None
            has_begun = any(line.endswith(f"{_BEGUN}\n".encode()) for line in child.stdout)
            if has_begun:
                yield child
            code = child.wait()
        finally:
            limit.cancel()
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    _close(pipe)
        words.seek(0)
        said = " ".join(words.read().decode(errors="replace").split())
    if code == 255 or code < 0:
        raise PlaceSilent(said or "the connection broke off")
    if code or not has_begun:
        raise UserError(said or (f"exit code {code}" if code else _NO_COMMANDS))


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was not sent is lost, and said
        return
