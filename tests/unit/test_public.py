"""The public functions stay what they are, whatever was imported before."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import echelon
from echelon.core.errors import UserError


def test_train_is_the_function_also_after_its_package_was_imported() -> None:
    importlib.import_module("echelon.trainer.folder")  # sets the package as an attribute of `echelon`
    with pytest.raises(UserError, match="sync"):
        echelon.train(data="digits", sync="nonsense")


def test_what_all_commands_import_is_without_torch() -> None:
    code = "import sys, echelon.api, echelon.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
