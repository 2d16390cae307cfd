"""Imported by the fork server alone, before all else: the server ends with the process that started it.

By itself it would notice only when its imports are done, seconds later. This is work at import, and meant to be: it is
the one moment at which the server runs anything of ours.
"""

from __future__ import annotations

import signal

from echelon.launch.death import die_with_parent

die_with_parent()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ctrl-C while it imports: without a traceback
