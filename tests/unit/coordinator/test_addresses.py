"""Where roles listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.coordinator.addresses import role_address


@pytest.mark.parametrize(("folder", "fits"), [("ps", True), ("模" * 25, True), ("模" * 29, False), ("p" * 90, False)])
def test_a_socket_whose_path_has_too_many_bytes_is_one_on_loopback(folder: str, fits: bool) -> None:
    assert role_address(Path("/", folder), "scheduler").startswith("ipc:") is fits
