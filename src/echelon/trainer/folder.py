"""A run's folder: made by whoever starts the run, locked while it goes, read by everyone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from echelon.checkpoint.files import check_whole, entries
from echelon.config import RunConfig, to_yaml
from echelon.core.errors import UserError, nearest
from echelon.core.files import write_atomic
from echelon.observe.environment import command_given_t, command_line
from echelon.records.events import Event
from echelon.records.file import newest
from echelon.records.going import LAUNCH_FILE, LOCK_FILE, Launch, holder, read_launch, resumed_by
from echelon.records.kinds import Start, Steps
from echelon.records.segments import RECORD_FILE
from echelon.records.summary import SUMMARY_FILE

SECRET_FOLDER = "machines"  # below a run's folder: what its machines share
CONFIG_FILE = "config.yaml"
CHECKPOINTS_FOLDER = "checkpoints"


def check_is_run(folder: Path) -> None:
    """Refuse a folder that holds no run.

    Raises:
        UserError: it does not; names the nearest one below `runs/`.
    """
    if not (folder / CONFIG_FILE).is_file():
        known = [str(path.parent) for path in Path("runs").glob(f"*/{CONFIG_FILE}")]
        lacks = f"there is no {CONFIG_FILE} in it" if folder.exists() else "there is no such folder"
        raise UserError(f"{folder} holds no run: {nearest(str(folder), known)}{lacks}")


def default_folder(config: RunConfig, root: Path = Path("runs"), model: str = "") -> Path:
    """Return the next free `runs/DATA-MODEL-NUMBER`; machines that share a rendezvous and a disk get the same one.

    Args:
        model: what the description's choice of a model became; empty: as described.
    """
    name = f"{_word(config.data.source)}-{_word(model or config.model.name)}"
    numbers = [int(m[1]) for p in root.glob(f"{name}-*") if (m := re.fullmatch(rf"{re.escape(name)}-(\d+)", p.name))]
    newest = root / f"{name}-{max(numbers, default=0)}"
    if numbers and joins(newest, config):
        return newest
    return root / f"{name}-{max(numbers, default=0) + 1}"


def _word(text: str) -> str:
    """Return the last part of a path or name, fit for a folder's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text.rstrip("/").rpartition("/")[2]).strip("-") or "run"


def joins(folder: Path, config: RunConfig) -> bool:
    """Whether a folder holds a run that other machines started for the same rendezvous and that has not ended."""
    launch = read_launch(folder)
    return bool(config.launch.rendezvous) and launch.rendezvous == config.launch.rendezvous and not launch.ended


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has a checkpoint, by name alone: its record misses one that was saved in the moment of a kill."""
    return any((folder / CHECKPOINTS_FOLDER).glob("step-*"))


def has_weights(folder: Path) -> bool:
    """Whether a folder is that of a run which others may start from."""
    return (folder / CONFIG_FILE).exists() and (folder / CHECKPOINTS_FOLDER).is_dir()


def check_weights(weights: str) -> None:
    """Refuse to start from a run none of whose checkpoints is whole, without torch; other weights are known with it.

    Raises:
        UserError: says what is damaged.
    """
    if weights and has_weights(folder := Path(weights).expanduser()):
        check_whole(folder / CHECKPOINTS_FOLDER, "best")


def _goes_on(folder: Path, config: RunConfig) -> bool:
    """Whether a folder says that a run with the same rendezvous, or none, was started and has not ended."""
    launch = read_launch(folder)
    return launch.launched_t is not None and launch.rendezvous == config.launch.rendezvous and not launch.ended


def never_began(folder: Path) -> bool:
    """Whether a folder's run ended before its first step, as one that was refused: nothing in it is worth keeping."""
    if not read_launch(folder).ended or any((folder / CHECKPOINTS_FOLDER).glob("*")):
        return False
    return next(newest(folder, Steps), None) is None


def claim(
    config: RunConfig, root: Path = Path("runs"), given_t: float | None = None, model: str = "", leads: bool = True
) -> RunConfig:
    """Make a new run's folder, and return the description that names it.

    Args:
        model: as for `default_folder`.
        given_t: when the command was given, in unix seconds; None: as this process knows.
        leads: whether this machine is the one whose command is the run's.

    Where the user names none it is the next free one of `default_folder`. It appears with the launch in it, in one
    step: commands that start at the same moment each get their own, and machines that share a rendezvous get the same.

    Raises:
        UserError: the folder holds a run already, or cannot be written.
    """
    folder = Path(config.run) if config.run else _claim_next(config, root, model)
    config = replace(config, run=str(folder))
    create(folder, config, given_t, leads)
    return config


@contextmanager
def reserved(config: RunConfig, model: str, root: Path = Path("runs")) -> Iterator[RunConfig]:
    """Hold the folder of a new run while it may yet be refused; gives the description that names it.

    One that the user names is only looked at. Unless the block comes to `create` it, the folder goes again.

    Args:
        model: as for `default_folder`.

    Raises:
        UserError: the folder holds a run already, or cannot be written.
    """
    if config.run:
        check_new(Path(config.run), config)
        yield config
        return
    folder = _claim_next(config, root, model)
    try:
        yield replace(config, run=str(folder))
    finally:
        if not (folder / CONFIG_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other runs are in it
                root.rmdir()


def _is_reserved(folder: Path) -> bool:
    """Whether a folder is one that `reserved` holds, and nothing more."""
    return folder.is_dir() and [each.name for each in folder.iterdir()] == [LAUNCH_FILE]


@contextmanager
def claimed(
    config: RunConfig, given_t: float, model: str = "", root: Path = Path("runs"), leads: bool = True
) -> Iterator[RunConfig]:
    """Make a new run's folder as `claim` does; gives the description that names it.

    Where the block refuses the run before its first step the folder goes again, unless it was there before or other
    machines are in it.
    """
    is_new = not config.run or not Path(config.run).exists() or _is_reserved(Path(config.run))
    is_new = is_new or joins(Path(config.run), config)  # of machines that share it, the last to be refused removes it
    in_root, config = not config.run, claim(config, root, given_t, model, leads)
    try:
        yield config
    except UserError:
        folder = Path(config.run)
        if is_new and never_began(folder):
            with suppress(UserError), locked(folder, shared=False):
                shutil.rmtree(folder)
            if in_root:
                with suppress(OSError):  # other runs are in it
                    root.rmdir()
        raise


def _claim_next(config: RunConfig, root: Path, model: str) -> Path:
    hidden = root / f".claim-{uuid4().hex}"
    try:
        hidden.mkdir(parents=True)
        _write_launch(hidden, config, None)
        while True:
            folder = default_folder(config, root, model)
            if joins(folder, config):  # another machine's, of this very run
                return folder
            try:
                return hidden.rename(folder)
            except OSError as error:  # taken meanwhile: a folder that holds something is not replaced
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    except OSError as error:
        raise _not_writable(root, error) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def create(folder: Path, config: RunConfig, given_t: float | None = None, leads: bool = True) -> None:
    """Make a new run's folder with its description.

    Raises:
        UserError: the folder holds a run already, or cannot be written.
    """
    if never_began(folder):
        for name in (RECORD_FILE, SUMMARY_FILE, "report.html"):
            (folder / name).unlink(missing_ok=True)
    else:
        _check_free(folder, config)
    prepare(folder, config, given_t, leads)


def check_new(folder: Path, config: RunConfig) -> None:
    """Refuse what `create` would refuse; leaves nothing behind.

    Raises:
        UserError: the folder holds a run already, or cannot be written.
    """
    if not never_began(folder):
        _check_free(folder, config)
    try:
        with tempfile.TemporaryFile(dir=next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from None


def _check_free(folder: Path, config: RunConfig) -> None:
    if joins(folder, config):
        return
    if (folder / CONFIG_FILE).exists():
        raise UserError(
            f"{folder} holds a run already: continue it with `{resumed_by(folder)}`, or choose another --run"
        )
    if entries(folder / CHECKPOINTS_FOLDER):
        raise UserError(
            f"{folder} holds checkpoints of a run whose {CONFIG_FILE} is gone: put it back, or choose another --run"
        )


def _not_writable(folder: Path, error: OSError) -> UserError:
    return UserError(f"--run {folder} cannot be written ({error.strerror}): name a folder that can be, or a new one")


def prepare(folder: Path, config: RunConfig, given_t: float | None = None, leads: bool = True) -> str:
    """Write the description and how the run was started.

    Args:
        leads: whether this machine is the one whose command is the run's; another one, which may share the folder and
            join late, leaves what that one wrote.

    Returns:
        the description that was there, for `put_back` where this one is refused; empty: none, or the same.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if leads or not _goes_on(folder, config):
            _write_launch(folder, config, given_t)
        file, text = folder / CONFIG_FILE, to_yaml(config)
        before = file.read_bytes().decode() if file.exists() else ""
        if before and not leads and _is_of_another_machine(folder, config):
            return ""  # its ranks read it; what this command says otherwise is refused as the machines meet
        write_atomic(file, text)  # last: who sees it can tell whose it is
        return before if before != text else ""
    except OSError as error:
        raise _not_writable(folder, error) from None


def _is_of_another_machine(folder: Path, config: RunConfig) -> bool:
    """Whether a command on another machine, with which this one shares the folder, has started its run."""
    by, several = read_launch(folder).by.rpartition(":")[0], "," in config.launch.rendezvous
    return _goes_on(folder, config) and by not in ("", socket.gethostname()) and not several


def put_back(folder: Path, description: str) -> None:
    """Write back the description of a run that was there before a command that is refused; empty: it stays.

    A run that has begun anew by that command goes on as it says.
    """
    begun = next(newest(folder, Start), None)
    if description and (begun is None or begun.t < (read_launch(folder).launched_t or 0.0)):
        write_atomic(folder / CONFIG_FILE, description)


def _write_launch(folder: Path, config: RunConfig, given_t: float | None) -> None:
    launch = Launch(
        command_given_t() if given_t is None else given_t, command_line(), config.launch.rendezvous, by=_this_process()
    )
    write_atomic(folder / LAUNCH_FILE, json.dumps(vars(launch)))


def _this_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def last_message(folder: Path, *events: type[Event]) -> str:
    """Return what the last event of some types since the command began says, or where to look when there is none."""
    last, since = next(newest(folder, *events), None), read_launch(folder).launched_t or 0.0
    return last.message if last and last.t >= since else f"the processes ended; see {folder}/logs"


def is_own_launch(folder: Path) -> bool:
    """Whether this command has written how the run was started; not another machine's that shares the folder."""
    return read_launch(folder).by == _this_process()


def mark_ended(folder: Path) -> None:
    """Note that the run has ended: a later start for the same rendezvous is a new run."""
    write_atomic(folder / LAUNCH_FILE, json.dumps({**vars(read_launch(folder)), "ended": True}))


@contextmanager
def locked(folder: Path, shared: bool) -> Iterator[None]:
    """Hold a run's folder while it goes; several machines of one run share it.

    Raises:
        UserError: another run goes on in this folder.
    """
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_writable(folder, error) from None
    with os.fdopen(fd, "r+"):
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = holder(folder)
            who = f" (process {pid})" if pid else ""
            raise UserError(f"a run goes on in {folder}{who}: wait for it, or choose another --run") from None
        yield
