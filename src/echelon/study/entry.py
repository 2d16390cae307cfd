"""Started by a study in a process of its own: `python -m echelon.study.entry PARENT train ...` is `echelon train ...`.

The one difference: it ends when its parent, the study's process, does, however that happened; half a run is of no use
to a study.
"""

from __future__ import annotations

import runpy
import sys

from echelon.launch.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    sys.argv[0] = "echelon"
    runpy.run_module("echelon.__main__", run_name="__main__")
