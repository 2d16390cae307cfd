"""What all tests share: two run at once, on one thread each, and none is judged by how long a drawn example took."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tensors of tests are small: several threads wait for each other longer than they compute, on a busy machine a hundred
# times as long. Ranks compute on one thread, too (`tests/ranks/spawn.py`).
torch.set_num_threads(1)

# The machine may have other work.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

AT_ONCE = 2
OF_CI = ("not slow and not long", "long")
NOT_BESIDE_EACH_OTHER = (  # these start daemons of the machine, or look at all of its networks
    "tests/clusters/",
    "tests/ranks/test_link",
    "tests/ranks/test_ports.py",
    "tests/ranks/test_train_nodes.py",
    "tests/ranks/server/test_machines.py",
)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's, where that is installed
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run two tests at once where all are asked for that a CI runs, and `-n` says nothing else."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a script's command with &
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or not config.pluginmanager.hasplugin("xdist") or config.option.numprocesses is not None:
        return
    all_tests = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if all_tests and config.option.markexpr in OF_CI and not config.option.usepdb:
        config.option.numprocesses = AT_ONCE


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Return what deals tests out: those of a file run one after the other, so do those that disturb each other."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "alone" if nodeid.startswith(NOT_BESIDE_EACH_OTHER) else super()._split_scope(nodeid)

    return ByFile(config, log)  # type: ignore[arg-type]
