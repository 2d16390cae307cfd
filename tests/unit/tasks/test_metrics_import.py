"""torchmetrics is imported without what its metrics for our tasks never use, which stays as it is for all others."""

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


@pytest.mark.long
def test_transformers_is_left_out_until_a_metric_uses_it() -> None:
    pytest.importorskip("transformers")
    code = (
        "import sys, echelon.tasks.metrics_import\n"
        "assert 'torchmetrics.classification' in sys.modules and 'transformers' not in sys.modules\n"
        "from torchmetrics.functional.text import bert\n"
        "assert not isinstance(3, bert.AutoModel) and 'transformers' not in sys.modules\n"
        "given = bert.AutoModel.from_pretrained\n"
        "import transformers\n"
        "assert given == transformers.AutoModel.from_pretrained and bert.AutoModel is not transformers.AutoModel\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
