"""One weight per sample, gradient 1, SGD: after each epoch every weight has moved exactly once, whatever died.

Run as a script it trains in a folder DIR, with processes that kill or stop themselves where they are told to:

    ECHELON_TEST_FAULTS='[["rank1.0", "backward", 5]]' python -m tests.ranks.counting_parts DIR WORKERS [NAME=VALUE ...]
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ranks.elastic_points import FAULTS, LEFT, Fault, install

__all__ = [
    "BATCH", "EPOCHS", "FAULTS", "HURRY", "LAYERS", "LEFT", "OVERFLOWS", "PACE", "SAMPLES", "SPEEDS", "STEPS", "TABLES",
    "WIDTH", "Counting", "CountingSGD", "Fault", "Numbers", "left_behind", "moved", "remembered", "train_in_folder",
    "waiting", "weight_of_each",
]  # fmt: skip

SAMPLES, BATCH, EPOCHS = 96, 12, 4
STEPS = SAMPLES // BATCH * EPOCHS
WIDTH = "ECHELON_TEST_WIDTH"
LAYERS = "ECHELON_TEST_LAYERS"  # matrices of weights, each of which moves as often
TABLES = "ECHELON_TEST_TABLES"  # tables of weights with sparse gradients beside them
PACE = "ECHELON_TEST_PACE_S"  # seconds that a forward pass takes
SPEEDS = "ECHELON_TEST_SPEEDS"  # seconds that a sample takes in training, by member
OVERFLOWS = "ECHELON_TEST_OVERFLOWS"  # the number of a sample whose gradient is infinite
HURRY = "ECHELON_TEST_HURRY"  # a file: once it is there, a forward pass takes none


class Numbers(Dataset[tuple[Tensor, int]]):
    """Samples that are their own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index % 2


def remembered(states: Iterable[Mapping[str, Any]], width: int) -> Tensor:
    """Return what codecs have not sent, by their states: how often each weight has yet to move, (SAMPLES, width)."""
    total = torch.zeros(SAMPLES * width, dtype=torch.float64)
    for state in states:
        for key, value in state.items():
            kind, _, rest = key.partition("/")
            if kind in ("sent.error", "relay.error"):
                start = int(rest.rpartition("/")[2])
                total[start : start + value.numel()] += value.double()
    return total.view(SAMPLES, -1) * BATCH


def _remembered_here(state: Mapping[str, Any]) -> Tensor:
    return remembered([state], int(os.environ[WIDTH]))


class Counting(nn.Module):
    """Rows of weights for each sample, as many and as wide as `LAYERS`, `TABLES` and `WIDTH` say; its output is their
    sum.

    Rows that are wide enough go through a codec; several layers of them are in several buckets of gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        width = int(os.environ.get(WIDTH, "1"))
        layers = int(os.environ.get(LAYERS, "1"))
        self.w = nn.Parameter(torch.zeros(SAMPLES, width, dtype=torch.float64))
        self.others = nn.ParameterList(torch.zeros_like(self.w) for _ in range(layers - 1))
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(torch.zeros_like(self.w), freeze=False, sparse=True)
            for _ in range(int(os.environ.get(TABLES, "0")))
        )
        self.fault = Fault()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Arrive in a process."""
        super().__setstate__(dict(state))
        if "ECHELON_MEMBER" in os.environ:
            install(_remembered_here)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 2): each sample's weight, and 0."""
        if not Path(os.environ.get(HURRY, os.devnull)).is_file():
            time.sleep(float(os.environ.get(PACE, "0")))
        training = self.training and torch.is_grad_enabled()
        Fault.trains = Fault.trains or training
        if Fault.trains:  # else the model is tried before training
            self.fault.at("forward" if training else "evaluation")
            if self.fault.is_due("error in forward"):
                raise RuntimeError("as the test wants it")
        if training:
            speeds = json.loads(os.environ.get(SPEEDS, "{}"))
            time.sleep(len(x) * speeds.get(os.environ.get("ECHELON_MEMBER", ""), 0.0))
        ids = x[:, 0].long()
        rows = [*(weights[ids] for weights in (self.w, *self.others)), *(table(ids) for table in self.tables)]
        own = torch.cat(rows, dim=1).sum(dim=1)
        if training and len(x):
            self.fault.at("sum", after_s=0.001)
            own.register_hook(functools.partial(self._in_backward, x[:, 0]))
        return torch.stack([own, torch.zeros_like(own)], dim=1)

    def _in_backward(self, numbers: Tensor, gradient: Tensor) -> Tensor:
        self.fault.at("backward")
        overflows = numbers == int(os.environ.get(OVERFLOWS, "-1"))
        if bool(overflows.any()):
            self.fault.at("overflow")
        return gradient.masked_fill(overflows, torch.inf)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        if Fault.trains:
            self.fault.at("state")
        super()._save_to_state_dict(*arguments)


class CountingSGD(torch.optim.SGD):
    """SGD that comes to points before and after its step."""

    fault = Fault()

    def step(self, closure: Any = None) -> Any:
        """Update."""
        if Fault.trains:  # else it is tried before training
            self.fault.at("before update")
        result = super().step(closure)
        if Fault.trains:
            self.fault.at("after update")
        return result


def weight_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's loss: the sum of its own weights, whose gradients are 1."""
    return outputs[:, 0]


def moved(folder: Path) -> Tensor:
    """Return how often each weight has moved, by the newest checkpoint."""
    from echelon.trainer.saving import state_of

    return -torch.cat(list(state_of(folder, "newest")["model"].values()), dim=1)


def waiting(folder: Path) -> Tensor:
    """Return, for each weight, how often it has yet to move by what codecs of all ranks had not sent at the end."""
    from echelon.checkpoint import RANKS
    from echelon.trainer.saving import state_of

    state = state_of(folder, "newest")
    ranks = [rank["sync"] for rank in state[RANKS].values()]
    return remembered(ranks, state["model"]["w"].shape[1])


def left_behind(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return what the codec of each that died remembered before its last sum, and after it; in counts of samples."""
    return [tuple(torch.load(path)) for path in sorted(folder.glob("*.pt"))]


def train_in_folder(model: nn.Module, **settings: Any) -> None:
    """Train as the command's arguments say, and leave with its exit code; `settings` of `echelon.train`."""
    import echelon

    folder, workers, *written = sys.argv[1:]
    asked: dict[str, Any] = {"elastic": "on", "epochs": EPOCHS}
    for setting in written:
        name, _, value = setting.partition("=")
        asked[name] = int(value) if value.isdigit() else value
    ended = echelon.train(
        model, run=folder, workers=int(workers), batch_size=BATCH, schedule="constant", weight_decay=0.0, device="cpu",
        threads=1, **settings, **asked,
    )  # fmt: skip
    sys.exit(ended.exit_code)


def main() -> None:
    """Train in a folder."""
    from tests.ranks.counting_parts import Counting, CountingSGD, Numbers, weight_of_each

    data = (Numbers(), Numbers())
    of_rows = int(os.environ.get(TABLES, "0")) > 0  # which one's own optimizer does not take
    optimizer = {"optimizer": "sgd", "momentum": 0.0} if of_rows else {"optimizer": CountingSGD}
    train_in_folder(Counting(), data=data, lr=float(BATCH), loss=weight_of_each, **optimizer)


if __name__ == "__main__":
    main()
