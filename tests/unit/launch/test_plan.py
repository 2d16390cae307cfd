"""What one machine is asked to start."""

from __future__ import annotations

import pytest

from echelon.core.errors import UserError
from echelon.launch.plan import check_processes, usable_cores


def test_more_processes_than_a_machine_holds_are_refused() -> None:
    check_processes(0)
    check_processes(max(16, usable_cores()))
    with pytest.raises(UserError, match="--workers 9000: this machine has"):
        check_processes(9000)
