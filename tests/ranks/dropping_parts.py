"""A model with dropout, of which one process kills itself at a step.

ECHELON_TEST_KILLED='["rank1.0", 9]' python -m tests.ranks.dropping_parts DIR WORKERS [NAME=VALUE ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn

KILLED = "ECHELON_TEST_KILLED"
STEPS = 30


class Dropping(nn.Module):
    """Drops half of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same start in each run
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
        self._passes = 0

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, 10)."""
        member = os.environ.get("ECHELON_MEMBER")
        if member and self.training and torch.is_grad_enabled():
            self._passes += 1
            if [member, self._passes] == json.loads(os.environ.get(KILLED, "[]")):
                os.kill(os.getpid(), signal.SIGKILL)
        outputs: Tensor = self.layers(images)
        return outputs


def main() -> None:
    """Train in a folder."""
    import echelon
    from tests.ranks.dropping_parts import Dropping

    folder, workers, *settings = sys.argv[1:]
    given: dict[str, Any] = dict(setting.split("=") for setting in settings)
    ended = echelon.train(
        Dropping(), "digits", run=folder, workers=int(workers), batch_size=96, lr=0.05, device="cpu", threads=1,
        eval_every=0, max_steps=STEPS, epochs=9, **given,
    )  # fmt: skip
    sys.exit(ended.exit_code)


if __name__ == "__main__":
    main()
