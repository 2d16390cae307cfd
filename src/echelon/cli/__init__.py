"""The command line: arguments in, words out."""

from __future__ import annotations

import atexit
import errno
import os
import re
import signal
import sys
from typing import Any, NoReturn

from echelon.core.errors import USER_ERROR_EXIT_CODE, JobFailed, UserError
from echelon.core.system import short_spins, why_unsupported


def main() -> None:
    """Run the command line.

    A user's mistake is one line on stderr and exit code 2; a signal that asks to stop is exit code 128 + signal.
    """
    if reason := why_unsupported():
        _say(reason)
        sys.exit(USER_ERROR_EXIT_CODE)
    from echelon.core.output import outlive_readers
    from echelon.core.stop import Stopped, leave_first_process, stop_at_once, stopped_exit_code

    leave_first_process()
    outlive_readers()
    os.environ.update(short_spins())
    try:
        stop_at_once()
        code = _run()
    except (Stopped, KeyboardInterrupt) as stop:
        _say("stopped")
        code = stopped_exit_code(stop.signum if isinstance(stop, Stopped) else signal.SIGINT)
    sys.exit(code)


def command() -> NoReturn:
    """Be the command `echelon`: this process ends with it.

    It ends at once, what was left to its end done (logs written, temporary folders removed): to take torch's modules
    apart takes most of a second.
    """
    try:
        main()
    except SystemExit as done:
        code = done.code
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code if isinstance(code, int) else 0)


def _run() -> int:
    """Run a command; returns the exit code."""
    import typer

    from echelon.cli.app import app
    from echelon.core.stop import stopped_exit_code

    if shell := os.environ.get("_ECHELON_COMPLETE"):
        from echelon.cli.completion import offer

        offer(shell, sys.argv[1:])
        return 0

    usage_error: Any = typer.BadParameter.__mro__[2]

    debug = "--debug" in sys.argv
    try:
        code = app(prog_name="echelon", standalone_mode=False, args=[a for a in sys.argv[1:] if a != "--debug"])
    except UserError as error:
        if debug:
            raise
        _say(str(error))
        code = USER_ERROR_EXIT_CODE
    except JobFailed as error:
        if debug:
            raise
        _say(str(error))
        code = 1
    except OSError as error:
        if debug or error.errno != errno.ENAMETOOLONG:
            raise
        _say(f"{error.filename}: a name in a path may have 255 bytes, a path 4095")
        code = USER_ERROR_EXIT_CODE
    except usage_error as error:
        _say(_usage(error))
        code = USER_ERROR_EXIT_CODE
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == stopped_exit_code(signal.SIGINT):  # what typer makes of Ctrl-C, without a word
        raise KeyboardInterrupt
    return int(code or 0)


def _usage(error: Any) -> str:
    """Return what is wrong with a command in one line, with what may have been meant."""
    from difflib import get_close_matches

    option, possible = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if option and possible:
        if option in _setting_flags():
            return f"this command takes no {option}, which a run has from its start: `echelon train` takes it"
        closest = next(iter(get_close_matches(option, possible, 1)), possible[0])
        return f"there is no option {option}: did you mean {closest}?"
    message = " ".join(error.format_message().split())
    if option and message.startswith("No such option"):
        return f"there is no option {option}{_hint(option)}"
    if extra := re.match(r"Got unexpected extra arguments? ?\(?s?\)? \((.*)\)$", message):
        return f"unexpected argument: {extra[1]}"
    return message[:1].lower() + message[1:]


def _hint(option: str | None) -> str:
    """Return the option that a setting's dotted name stands for: `--training.lr` is `--lr`."""
    last = (option or "").rpartition(".")[2].replace("_", "-")
    return f": did you mean --{last}?" if f"--{last}" in _setting_flags() and f"--{last}" != option else ""


def _setting_flags() -> list[str]:
    """Return the options of all settings of a run."""
    from echelon.config.build import flag_of, leaves

    return [flag_of(name, item) for name, item, _ in leaves()]


def _say(message: str) -> None:
    print(f"echelon: {message}", file=sys.stderr)
