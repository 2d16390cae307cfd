"""One step, in a process of its own: `python -m echelon.flows.child PARENT FLOW STEP [RETRIES]`.

It computes the step's fingerprint, does nothing where the step's record ends with it and its outputs are whole, else
runs the step's command and writes the end. So a step is done when its own record says so, whoever started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.stop import Stopped, signal_name, stop_on_signals, stopped_exit_code
from echelon.flows.base import Call, Flow, FlowStep, step_folder, with_paths
from echelon.flows.fingerprint import StepFingerprint, fingerprint
from echelon.flows.kinds import KINDS
from echelon.flows.state import (
    COMPLETED,
    FAILED,
    LOG_FILE,
    REFUSED,
    STOPPED,
    clear,
    completed_end,
    last_line,
    load_flow,
    only_start,
    output_hashes,
    undamaged,
)
from echelon.launch.process import die_with_parent
from echelon.records.file import Recorder, newest
from echelon.records.kinds import End, FlowStepEnd, FlowStepStart, Start
from echelon.trainer.folder import has_checkpoint

STEP_VARIABLE = "ECHELON_FLOW_STEP"
"""In the environment of all of a step's processes: its folder, by which what a killed driver left is found."""
STOP_S = 90.0
_LOOK_S = 0.05


def hashes_of(folder: Path, step: str) -> Mapping[str, str]:
    """Return the hashes of a done step's outputs.

    Raises:
        UserError: it is not done.
    """
    end = completed_end(step_folder(folder, step))
    if end is None:
        raise UserError(f"{step} is not done")
    return end.outputs


def is_done(flow: Flow, folder: Path, step: FlowStep, now: StepFingerprint) -> bool:
    """Whether a step's record ends with its fingerprint, and its outputs are whole."""
    end = completed_end(step_folder(folder, step.name))
    return end is not None and end.fingerprint == now.digest and undamaged(flow, folder, step, end)


def do_step(folder: Path, name: str) -> FlowStepEnd | None:
    """Do a step of a flow; returns how it ended, None where it was done already.

    Raises:
        UserError: the folder holds no such flow, or another process does the step.
        Stopped: a signal asked for it; the step's record says so.
    """
    with only_start(step_folder(folder, name)):
        return _do_step(folder, name)


def _do_step(folder: Path, name: str) -> FlowStepEnd | None:
    flow = load_flow(folder)
    step = flow.steps[name]
    now = fingerprint(flow, step, lambda before: hashes_of(folder, before))
    if is_done(flow, folder, step, now):
        return None
    where = step_folder(folder, name)
    goes_on = _can_go_on(step, where, now)
    if not goes_on:
        clear(where)
    recorder = Recorder(where)
    began = time.monotonic()
    try:
        recorder.write(FlowStepStart(now.digest, now.parts, goes_on))
        try:
            status, message = _run(flow, folder, step, goes_on)
            outputs = output_hashes(flow, folder, step) if status == COMPLETED else {}
        except Stopped:
            recorder.write(FlowStepEnd(now.digest, STOPPED, "", time.monotonic() - began))
            raise
        except FileNotFoundError as missing:
            status, outputs = FAILED, {}
            message = f"it ended well and did not write {os.path.relpath(missing.args[0], where)}"
        end = FlowStepEnd(now.digest, status, message, time.monotonic() - began, outputs)
        recorder.write(end)
        return end
    finally:
        recorder.close()


def _can_go_on(step: FlowStep, where: Path, now: StepFingerprint) -> bool:
    """Whether a start with the same fingerprint was cut short, and left a checkpoint to go on from."""
    line = last_line(where)
    if not KINDS[step.kind].goes_on or line is None or line.fingerprint != now.digest:
        return False
    if isinstance(line, FlowStepEnd) and line.status in (COMPLETED, REFUSED):
        return False
    return _run_is_over(where) or has_checkpoint(where / "run")


def _run_is_over(where: Path) -> bool:
    """Whether the step's own run came to its end."""
    last = next(iter(newest(where / "run", Start, End)), None) if (where / "run").is_dir() else None
    return isinstance(last, End) and last.status == COMPLETED


def _run(flow: Flow, folder: Path, step: FlowStep, goes_on: bool) -> tuple[str, str]:
    """Run a step's command; returns its status, and why it is not `completed`."""
    where = step_folder(folder, step.name)
    kind = KINDS[step.kind]
    if kind.goes_on and goes_on and _run_is_over(where):  # all that was missing is to say so
        return COMPLETED, ""
    arguments = [with_paths(flow, folder, step, text) for text in step.arguments]
    settings = [(name, with_paths(flow, folder, step, value)) for name, value in step.settings]
    command = kind.command(Call(where.absolute(), arguments, settings))
    if goes_on:
        command = [sys.executable, "-m", "echelon", "resume", str(where.absolute() / "run")]
    code, error = _command(command, flow.base, where, step, kind.stdout)
    if code == 0 and kind.goes_on and not _run_is_over(where):
        return FAILED, "its run has not come to its end"
    if code == 0:
        return COMPLETED, ""
    how = f"{signal_name(-code)}" if code < 0 else f"exit code {code}"
    is_refusal = code == USER_ERROR_EXIT_CODE and step.kind != "command"
    return REFUSED if is_refusal else FAILED, error or f"its command ended with {how}"


def _command(command: list[str], base: Path, where: Path, step: FlowStep, stdout: str) -> tuple[int, str]:
    """Run a command to its end, or to its time limit; returns its exit code and its last line of errors."""
    log = where / LOG_FILE
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(step.resources.cores))
    with log.open("ab") as errors, (where / stdout if stdout else log).open("wb" if stdout else "ab") as out:
        begins = errors.tell()
        try:
            process = subprocess.Popen(
                command, cwd=base, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment,
                preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return 1, f"{command[0]}: {error.strerror}"
        try:
            process.wait(step.resources.time_s)
        except subprocess.TimeoutExpired:
            _end(process, step.kind == "command")
            return process.returncode or 1, f"it took longer than {step.resources.time_s:.0f} s and was ended"
        finally:
            _end(process, step.kind == "command")
    return process.returncode, _last_line(log, begins)


def _end(process: subprocess.Popen[bytes], asks_all: bool) -> None:
    """End what still runs; a run that is asked first saves a checkpoint.

    Args:
        asks_all: ask what a shell has started too; a command of ours asks its own processes.
    """
    ends_s = time.monotonic() + STOP_S
    if process.poll() is None:
        with suppress(ProcessLookupError):
            (os.killpg if asks_all else os.kill)(process.pid, signal.SIGTERM)
        while time.monotonic() < ends_s and (process.poll() is None or _has_any(process.pid)):
            time.sleep(_LOOK_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)


def _has_any(group: int) -> bool:
    """Whether a process group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _last_line(log: Path, begins: int) -> str:
    with log.open("rb") as file:
        file.seek(begins)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("echelon: ")[:300] if lines else ""


def main() -> int:
    """Do the step that the command names; returns 0 where it is done."""
    parent, folder, name = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if parent:
        die_with_parent(parent)
    os.environ[STEP_VARIABLE] = str(step_folder(folder, name).resolve())
    try:
        with stop_on_signals(raises=True):
            end = do_step(folder, name)
            for _ in range(int(sys.argv[4]) if len(sys.argv) > 4 else 0):
                if end is None or end.status != FAILED:
                    break
                end = do_step(folder, name)
    except UserError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except Stopped as stop:
        return stopped_exit_code(stop.signum or signal.SIGTERM)
    if end is None or end.status == COMPLETED:
        return 0
    print(f"echelon: {name}: {end.message}", file=sys.stderr)
    return USER_ERROR_EXIT_CODE if end.status == REFUSED else 1


if __name__ == "__main__":
    sys.exit(main())
