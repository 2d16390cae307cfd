"""A user's model and data in which one process falls ill at a step, in the way that the environment names.

`ECHELON_FAULT` is HOW:PROCESS:STEP, such as `sleep:rank1:12`. Each fault strikes once: it leaves `struck` in the
current folder, so that the run that restarts is well.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from echelon.models.base import ModelInput
from echelon.models.builtin.small_vit import Size, SmallViT

FOREVER_S = 3600.0
SLOW_S = 0.5
STRUCK = Path("struck")


def _is_due(calls: int, *kinds: str) -> bool:
    """Whether one of some kinds of faults is to strike this process now, for the first time in this run."""
    how, process, step = os.environ.get("ECHELON_FAULT", "::").split(":")
    if how not in kinds or multiprocessing.current_process().name.partition(".")[0] != process or calls < int(step):
        return False
    if how != "slow":
        try:
            STRUCK.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def fall_asleep() -> None:
    """Never come back."""
    time.sleep(FOREVER_S)


def wait_for_own_lock() -> None:
    """Take a lock that this thread has."""
    lock = threading.Lock()
    with lock, lock:
        return


def crawl() -> None:
    """Take long, each time."""
    time.sleep(SLOW_S)


def compute_without_a_word() -> None:
    """Hold the interpreter's lock for good, as a library in C may."""
    while True:
        ctypes.PyDLL(None).sleep(int(FOREVER_S))  # a signal wakes it


def cut_the_link() -> None:
    """Take this process's way to the others away: it is root in a network namespace of its own."""
    shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    names = [line.split(": ")[1].partition("@")[0] for line in shown.splitlines()]
    for name in names:
        if name != "lo":
            subprocess.run(["ip", "link", "set", name, "down"], check=True)


def eat() -> None:
    """Take memory until the kernel has enough of it."""
    eaten = []
    while True:
        eaten.append(torch.ones(1 << 22))


def ask_for_too_much() -> None:
    """Ask for more memory than there is."""
    torch.empty(1 << 48)


FAULTS = {
    "sleep": fall_asleep,
    "lock": wait_for_own_lock,
    "gil": compute_without_a_word,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "cut": cut_the_link,
    "slow": crawl,
    "eat": eat,
    "ask": ask_for_too_much,
}


class FaultyBlock(nn.Module):
    """Passes its input on, until its fault strikes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def strike(self, module: nn.Module, inputs: Any) -> None:
        """Count a forward pass of training, as a hook before it."""
        if not module.training or not torch.is_grad_enabled():
            return
        self.calls += 1
        for how, fault in FAULTS.items():
            if _is_due(self.calls, how):
                fault()


def net(data: ModelInput) -> nn.Module:
    """Two layers."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(data.channels * data.image_size**2, 32), nn.ReLU())
    model.append(nn.Linear(32, data.classes))
    model[1].register_forward_pre_hook(FaultyBlock().strike)
    return model


def vit(data: ModelInput) -> nn.Module:
    """A small vision transformer, which any layout can split."""
    model = SmallViT(data, Size(width=32, heads=4, depth=4, hidden=64))
    for block in model.blocks:
        block.register_forward_pre_hook(FaultyBlock().strike)
    return model


class Points(Dataset[tuple[Tensor, int]]):
    """Small grey images of two classes."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._images = torch.rand(count, 1, 8, 8, generator=generator)
        self.targets = (self._images.mean(dim=(1, 2, 3)) > 0.5).long().tolist()
        self.calls = 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        if _is_due(self.calls, "loader"):
            self.read_from_dead_disk()
        return self._images[index], self.targets[index]

    def read_from_dead_disk(self) -> None:
        """Wait for a file that never comes."""
        time.sleep(FOREVER_S)


def points() -> tuple[Points, Points]:
    """Return training and evaluation data."""
    return Points(512, 0), Points(64, 1)
