"""What all tests share: two run at once, on one thread each, and none is judged by how long a drawn example took."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

# Tensors of tests are small: several threads wait for each other longer than they compute, on a busy machine a hundred
# times as long. Ranks compute on one thread, too (`tests/ranks/spawn.py`).
torch.set_num_threads(1)

# The machine may have other work.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

AT_ONCE = ("not slow and not long", "long")
NOT_BESIDE_EACH_OTHER = (  # these start daemons of the machine, or look at all of its networks
    "tests/clusters/",
    "tests/ranks/test_link",
    "tests/ranks/test_ports.py",
    "tests/ranks/test_train_nodes.py",
    "tests/ranks/server/test_machines.py",
)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many tests run at once: two of all that a CI runs; else none beside this process."""
    all_tests = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return 2 if all_tests and config.option.markexpr in AT_ONCE else 0


class _ByFile(LoadFileScheduling):
    """The tests of a file run one after the other, and so do those that may not run beside each other."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(NOT_BESIDE_EACH_OTHER) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _ByFile:
    """Return what gives files of tests to processes."""
    return _ByFile(config, log)  # type: ignore[arg-type]
