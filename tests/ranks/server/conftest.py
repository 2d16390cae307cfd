"""What a test leaves behind when it fails is ended: a role that goes on would disturb those after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.server.roles import Cluster


@pytest.fixture(autouse=True)
def _ended_roles() -> Iterator[None]:
    yield
    for cluster in list(Cluster.running):
        cluster.end()
