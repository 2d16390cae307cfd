"""Imported by the fork server alone, before all else: the server ends with the process that started it.

By itself it would notice only when its imports are done, seconds later. Service managers and `timeout` end whole groups
of processes at once, terminals too: it outlives that, for all that it forked ends with it, and its parent may want to
save first. This is work at import, and meant to be: it is the one moment at which the server runs anything of ours.
"""

from __future__ import annotations

import os
import signal

from echelon.launch.process import die_with_parent

die_with_parent()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ctrl-C while it imports: without a traceback
_server = os.getpid()
_former = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGHUP)}


def _as_before() -> None:
    if os.getppid() == _server:
        for signum, handler in _former.items():
            signal.signal(signum, handler)


os.register_at_fork(after_in_child=_as_before)
