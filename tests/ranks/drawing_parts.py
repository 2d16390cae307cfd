"""A network with BatchNorm and dropout, or without, that notes in a file what each step begins with.

Run as a script it trains in a folder, as `counting_parts.py` does; its processes come to the same points:

    ECHELON_TEST_NOTES=NOTES ECHELON_TEST_DRAWS=1 python -m tests.ranks.drawing_parts DIR WORKERS [NAME=VALUE ...]
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks.counting_parts import SAMPLES, CountingSGD, Numbers, train_in_folder
from tests.ranks.elastic_points import Fault, install

NOTES = "ECHELON_TEST_NOTES"  # a folder: each member notes there what its steps begin with
DRAWS = "ECHELON_TEST_DRAWS"  # 1: with BatchNorm and dropout


class Drawing(nn.Module):
    """Two layers, and between them BatchNorm and dropout, or nothing; notes states before each pass of training."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 16), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16) if draws else nn.Identity()
        self.dropout = nn.Dropout(0.5 if draws else 0.0)
        self.register_buffer("passes", torch.zeros(()))
        self.fault = Fault()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Arrive in a process."""
        super().__setstate__(dict(state))
        if "ECHELON_MEMBER" in os.environ:
            install(lambda state: torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 2)."""
        if self.training and torch.is_grad_enabled():
            Fault.trains = True
            self._note(len(x))
            self.fault.at("forward")
            self.passes = self.passes + 1  # another tensor each time
        hidden = self.dropout(torch.relu(self.norm(self.first(x / SAMPLES))))
        if hidden.requires_grad:
            hidden.register_hook(self._in_backward)
        logits: Tensor = self.last(hidden)
        return logits

    def _in_backward(self, gradient: Tensor) -> None:
        self.fault.at("backward")

    def _note(self, samples: int) -> None:
        member = os.environ.get("ECHELON_MEMBER", "")
        if NOTES not in os.environ or not member:
            return
        state = {**self.state_dict(), "generator": torch.get_rng_state()}
        sums = {name: zlib.crc32(tensor.detach().numpy().tobytes()) for name, tensor in state.items()}
        with (Path(os.environ[NOTES]) / f"{member}.jsonl").open("a") as file:
            file.write(json.dumps({"samples": samples, **sums}) + "\n")


def notes_of(folder: Path, member: str) -> list[dict[str, int]]:
    """Return, of each pass of a member, its samples and the checksums of all that it began with."""
    return [json.loads(line) for line in (folder / f"{member}.jsonl").read_text().splitlines()]


def main() -> None:
    """Train in a folder."""
    from tests.ranks.drawing_parts import Drawing

    torch.manual_seed(0)
    model = Drawing(os.environ.get(DRAWS) == "1")
    train_in_folder(model, data=(Numbers(), Numbers()), lr=0.1, optimizer=CountingSGD)


if __name__ == "__main__":
    main()
