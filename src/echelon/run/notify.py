"""Telling somebody outside how a run ended, or that a process of it died: a webhook, or a program (`--notify`).

What cannot be told is said in the run's output, and changes nothing in the run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from string import Template

from echelon.core.errors import UserError

TELL_S = 10.0
QUIET_S = 300.0  # between words on trouble
_WEB = ("http://", "https://")


def is_webhook(target: str) -> bool:
    """Whether `--notify` names a URL; else it names a program.

    >>> is_webhook("https://example.org/hook"), is_webhook("./tell.sh")
    (True, False)
    """
    return target.startswith(_WEB)


def check_notify(target: str) -> None:
    """Refuse what nobody can be told by.

    Raises:
        UserError: it is neither a URL nor a program that can be run.
    """
    if target and not is_webhook(target) and shutil.which(target) is None:
        raise UserError(f"--notify {target}: give http(s)://... or a program that can be run, such as ./tell.sh")


class Notifier:
    """Tells of one run."""

    def __init__(self, target: str, run: Path) -> None:
        """Prepare to tell; an empty target is told nothing."""
        self._target, self._run = target, run
        self._told_s: float | None = None

    def end(self, status: str, message: str) -> None:
        """Tell how the run ended; waits until that is told, at most `TELL_S`."""
        if self._target:
            self._tell(status, message)

    def trouble(self, message: str) -> None:
        """Tell that something went wrong and the run goes on, beside it; what follows soon is left out."""
        now = time.monotonic()
        if not self._target or (self._told_s is not None and now - self._told_s < QUIET_S):
            return
        self._told_s = now
        threading.Thread(target=self._tell, args=("trouble", message), daemon=True).start()

    def _tell(self, status: str, message: str) -> None:
        run, host = str(self._run.absolute()), socket.gethostname()
        text = f"echelon: {self._run.name} on {host}: {status}{f': {message}' if message else ''}"
        body = json.dumps({"text": text, "run": run, "host": host, "status": status, "message": message})
        why = self._post(body) if is_webhook(self._target) else self._start(body)
        if why:
            from echelon.run.machine import say

            say(f"--notify: nobody was told that the run is {status}: {why}")

    def _post(self, body: str) -> str:
        """Send to the webhook; returns why that failed, without the URL, which may hold a secret."""
        import http.client
        import urllib.error
        import urllib.request

        try:
            url = Template(self._target).substitute(os.environ)
            request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=TELL_S):
                return ""
        except KeyError as missing:
            return f"{missing} is not set on this machine"
        except urllib.error.HTTPError as error:
            return f"the server answers {error.code}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(getattr(error, "reason", "")) or type(error).__name__

    def _start(self, body: str) -> str:
        from echelon.messages.identity import SECRET_VARIABLE

        environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        program = shutil.which(self._target) or self._target
        try:
            done = subprocess.run(
                [program], input=body.encode(), env=environment, capture_output=True, timeout=TELL_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{self._target} did not end within {TELL_S:.0f}s, and was ended"
        except OSError as error:
            return f"{self._target}: {error.strerror}"
        return f"{self._target}: exit code {done.returncode}" if done.returncode else ""
