"""The command line: arguments in, words out."""

from __future__ import annotations

import sys
from typing import Any

from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    import typer

    from echelon.cli.app import app

    usage_error: Any = typer.BadParameter.__mro__[2]

    debug = "--debug" in sys.argv
    try:
        code = app(standalone_mode=False, args=[a for a in sys.argv[1:] if a != "--debug"])
    except UserError as error:
        if debug:
            raise
        _say(str(error))
        code = USER_ERROR_EXIT_CODE
    except usage_error as error:
        _say(" ".join(error.format_message().split()))
        code = USER_ERROR_EXIT_CODE
    except (typer.Abort, KeyboardInterrupt):
        _say("stopped")
        code = 130
    sys.exit(code or 0)


def _say(message: str) -> None:
    print(f"echelon: {message}", file=sys.stderr)
