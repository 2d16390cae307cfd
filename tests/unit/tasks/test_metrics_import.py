"""torchmetrics is imported without scipy.signal, which stays as it is for everybody else."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.long
def test_scipy_signal_is_left_out_and_can_be_imported_later() -> None:
    code = (
        "import sys, echelon.tasks.metrics_import\n"
        "assert 'torchmetrics.classification' in sys.modules and 'scipy.signal' not in sys.modules\n"
        "import scipy, scipy.signal\n"
        "assert callable(scipy.signal.resample_poly) and scipy.signal is sys.modules['scipy.signal']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
