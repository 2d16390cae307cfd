"""One weight per sample, gradient 1, SGD: after each epoch every weight has moved exactly once, whatever died.

Run as a script it trains in a folder DIR, with processes that kill or stop themselves where they are told to:

    ECHELON_TEST_FAULTS='[["rank1.0", "backward", 5]]' python -m tests.ranks.counting_parts DIR WORKERS [NAME=VALUE ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FAULTS = "ECHELON_TEST_FAULTS"
SAMPLES, BATCH, EPOCHS = 96, 12, 4
STEPS = SAMPLES // BATCH * EPOCHS
WIDTH = "ECHELON_TEST_WIDTH"
LEFT = "ECHELON_TEST_LEFT"  # where who dies in a coded sum leaves what its codec remembers
PACE = "ECHELON_TEST_PACE_S"  # seconds that a forward pass takes
SPEEDS = "ECHELON_TEST_SPEEDS"  # seconds that a sample takes in training, by member
HURRY = "ECHELON_TEST_HURRY"  # a file: once it is there, a forward pass takes none


class Numbers(Dataset[tuple[Tensor, int]]):
    """Samples that are their own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index % 2


class Fault:
    """Ends this process where it is told to: the n-th time that it comes to a point.

    Attributes:
        trains: this process has begun to.
    """

    trains = False

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def is_due(self, point: str) -> bool:
        """Come to a point; returns whether this process is to end there."""
        self._counts[point] = count = self._counts.get(point, 0) + 1
        member = os.environ.get("ECHELON_MEMBER", "")
        return [member, point, count] in json.loads(os.environ.get(FAULTS, "[]"))

    def at(self, point: str, after_s: float | None = None) -> None:
        """Come to a point; `after_s`: the end comes so much later, while the process goes on.

        A fault at `POINT, stopped` stops the process there (SIGSTOP) instead of ending it.
        """
        if self.is_due(f"{point}, stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if not self.is_due(point):
            return
        if after_s is None:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=_die, args=(after_s,), daemon=True).start()


def _die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


class CodedPoints:
    """Points of sums with a codec; who dies there leaves behind what its codec remembers.

    `collect`, `spread`, `summed`: before the messages to owners, before those of owners, after both.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._work: Any = None

    def install(self) -> None:
        """Let sums come to the points; `Fault` counts each."""
        from echelon.collectives.compressed_all_reduce import CompressedAllReduce
        from echelon.collectives.work import CodecWork

        reduce, collect = CodecWork._reduce, CompressedAllReduce._collect
        spread = CompressedAllReduce._spread

        def reduced(work: Any, filling: Any) -> None:
            self._work = work
            reduce(work, filling)

        def collected(part: Any, *arguments: Any) -> Any:
            self._at("collect")
            return collect(part, *arguments)

        def spread_out(part: Any, *arguments: Any) -> int:
            self._at("spread")
            sent = spread(part, *arguments)
            self._at("summed")
            return sent

        CodecWork._reduce, CompressedAllReduce._collect = reduced, collected  # type: ignore[method-assign]
        CompressedAllReduce._spread = spread_out  # type: ignore[method-assign]

    def _at(self, point: str) -> None:
        if self._fault.is_due(point):
            self._die()

    def _die(self) -> None:
        after = self._memory()
        for filling in self._work._fillings:
            filling.snapshot.restore()
        torch.save([self._memory(), after], Path(os.environ[LEFT]) / f"{os.environ['ECHELON_MEMBER']}.pt")
        os.kill(os.getpid(), signal.SIGKILL)

    def _memory(self) -> Tensor:
        return remembered([self._work.state_dict()], int(os.environ[WIDTH]))


@cache
def coded_points(fault: Fault) -> None:
    """Install the points of sums with a codec, once in a process, where it is told where to leave memories."""
    if LEFT in os.environ:
        CodedPoints(fault).install()


@cache
def term_points(fault: Fault) -> None:
    """Let this process come to points of a new term.

    `enter`, `window`: where it is about to connect, and where it first meets the others before a step.
    """
    from echelon.trainer import elastic
    from echelon.trainer.window import Window

    enter = elastic.enter_term

    def entered(*arguments: Any) -> Any:
        fault.at("enter")
        return enter(*arguments)

    elastic.enter_term = entered

    begin = Window.__init__

    def begun(window: Any, *arguments: Any) -> None:
        fault.at("window")
        begin(window, *arguments)

    Window.__init__ = begun  # type: ignore[method-assign]


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


class Counting(nn.Module):
    """A row of weights for each sample, as many as `WIDTH` says; its output is their sum.

    Rows that are wide enough go through a codec.
    """

    def __init__(self) -> None:
        super().__init__()
        width = int(os.environ.get(WIDTH, "1"))
        self.w = nn.Parameter(torch.zeros(SAMPLES, width, dtype=torch.float64))
        self.fault = Fault()

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
        own = self.w[x[:, 0].long()].sum(dim=1)
        if training and len(x):
            self.fault.at("sum", after_s=0.001)
            own.register_hook(self._in_backward)
        return torch.stack([own, torch.zeros_like(own)], dim=1)

    def _in_backward(self, gradient: Tensor) -> None:
        self.fault.at("backward")
        coded_points(self.fault)
        term_points(self.fault)

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

    weights: Tensor = state_of(folder, "newest")["model"]["w"]
    return -weights


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


def main() -> None:
    """Train in a folder."""
    import echelon
    from tests.ranks.counting_parts import Counting, CountingSGD, Numbers, weight_of_each

    folder, workers, *settings = sys.argv[1:]
    given: dict[str, Any] = {"elastic": "on", "epochs": EPOCHS}
    for setting in settings:
        name, _, value = setting.partition("=")
        given[name] = int(value) if value.isdigit() else value
    ended = echelon.train(
        Counting(), (Numbers(), Numbers()), run=folder, workers=int(workers), batch_size=BATCH, lr=float(BATCH),
        loss=weight_of_each, optimizer=CountingSGD, schedule="constant", weight_decay=0.0, device="cpu", threads=1,
        **given,
    )  # fmt: skip
    sys.exit(ended.exit_code)


if __name__ == "__main__":
    main()
