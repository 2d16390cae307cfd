"""What torch's elastic agent says on the terminal."""

from __future__ import annotations

import logging

from echelon.launch.elastic import _silence_elastic


def test_a_stop_is_said_by_us_alone() -> None:
    loggers = [logging.getLogger(f"torch.distributed.elastic.{name}") for name in ("agent.server.api", "rendezvous")]
    levels = [each.level for each in loggers]
    try:
        _silence_elastic()
        assert not any(each.isEnabledFor(logging.ERROR) for each in loggers)
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
