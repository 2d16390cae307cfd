"""What a step has freed is there for the next one: the system does not take it back in between."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from echelon.trainer.process import keep_freed_memory

ROUNDS = """
import ctypes, resource

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        held = [libc.malloc(20 << 20) for _ in range(4)]
        for block in held:
            ctypes.memset(block, 1, 20 << 20)
        for block in reversed(held):
            libc.free(ctypes.c_void_p(block))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = [faults(), faults()]  # before anything is imported that has memory above theirs
from echelon.trainer.process import keep_freed_memory
kept = keep_freed_memory()
faults()
print(found[1], kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's")
def test_memory_is_not_asked_for_again_in_each_step() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    before, kept, after = done.stdout.split()
    assert kept == "True" and int(before) > 10_000 and int(after) < 1_000


def test_limits_of_the_environment_stay() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "1"}) and not keep_freed_memory({"GLIBC_TUNABLES": ""})
