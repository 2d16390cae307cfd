"""What a run froze is let go where its process goes on, and what its caller froze stays so."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNTS = """
import gc, weakref
from echelon.observe.garbage import GarbageClock

class Model:
    def __init__(self):
        self.me = self

def trained(**how):
    model = Model()
    seen = weakref.ref(model)
    try:
        with GarbageClock(**how):
            raise ValueError("in a step")
    except ValueError:
        pass
    del model
    gc.collect()
    assert not gc.callbacks
    return seen() is None

"""
CASES = {
    "the caller's process": "assert trained() and gc.get_freeze_count() == 0",
    "the caller's, which froze something": "gc.freeze(); n = gc.get_freeze_count(); assert trained()\n"
    "assert n / 2 < gc.get_freeze_count() <= n",
    "one that ends with the run": "assert not trained(thaws=False) and gc.get_freeze_count()",
    "one that froze what it keeps": "assert trained(freezes=False) and gc.get_freeze_count() == 0",
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_made_before_can_be_collected_where_the_process_goes_on(case: str) -> None:
    subprocess.run([sys.executable, "-c", COUNTS + CASES[case]], check=True, timeout=60)
