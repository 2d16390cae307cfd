"""The counting run, with a process that never returns from a forward pass.

    ECHELON_TEST_HANGS='["rank1.0", 12, "loop"]' python -m tests.ranks.endless_parts DIR WORKERS [NAME=VALUE ...]

A member comes to its n-th forward pass, and turns in a loop there (`loop`) or waits for a lock that it has (`lock`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import torch
from torch import Tensor

from tests.ranks.counting_parts import BATCH, EPOCHS, Counting

HANGS = "ECHELON_TEST_HANGS"


class Endless(Counting):
    """Counts, until its process hangs."""

    def __init__(self) -> None:
        super().__init__()
        self._passes = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 2)."""
        if self.training and torch.is_grad_enabled() and os.environ.get("ECHELON_MEMBER"):
            self._passes += 1
            self._hang()
        return super().forward(x)

    def _hang(self) -> None:
        member, count, how = json.loads(os.environ[HANGS])
        if os.environ["ECHELON_MEMBER"] != member or self._passes != count:
            return
        lock = threading.Lock()
        lock.acquire()
        if how == "lock":
            lock.acquire()
        while True:
            pass


def main() -> None:
    """Train in a folder."""
    import echelon
    from tests.ranks.counting_parts import CountingSGD, Numbers, weight_of_each
    from tests.ranks.endless_parts import Endless

    folder, workers, *settings = sys.argv[1:]
    given: dict[str, Any] = dict(setting.split("=") for setting in settings)
    ended = echelon.train(
        Endless(), (Numbers(), Numbers()), run=folder, workers=int(workers), batch_size=BATCH, lr=float(BATCH),
        loss=weight_of_each, optimizer=CountingSGD, schedule="constant", weight_decay=0.0, device="cpu", threads=1,
        epochs=EPOCHS, elastic="on", **given,
    )  # fmt: skip
    sys.exit(ended.exit_code)


if __name__ == "__main__":
    main()
