"""A process that ran out of memory: called so, with what was predicted for it and what would need less."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import RunConfig, load_run_config
from echelon.core.errors import UserError
from echelon.core.units import format_bytes
from echelon.launch.supervisor import Death
from echelon.observe.oom import OUT_OF_MEMORY, KillsForMemory
from echelon.run.resolve import resolve

if TYPE_CHECKING:
    from echelon.trainer.resolved import ResolvedRun

PROCESS_BYTES = 400_000_000  # that Python and torch take of themselves
RECKON_S = 30.0
_MOST_TOLD = 4


@dataclass(frozen=True)
class _Need:
    """What a setting, as flags, makes each rank need at its peak."""

    flags: str
    peak_bytes: int


class OutOfMemory:
    """Tells of a death that it was for want of memory, and reckons once what would fit."""

    def __init__(self, path: Path, ranks: int) -> None:
        """Take the run's folder, and the ranks, or workers, of this machine."""
        self._path, self._ranks = path, ranks
        self._kills = KillsForMemory()
        self._fit: str | None = None

    def begin(self, pid: int) -> None:
        """Note a process that has begun."""
        self._kills.begin(pid)

    def killed(self, death: Death, reason: str = "") -> bool:
        """Whether the kernel killed a process for want of memory."""
        is_kill = death.exit_code == -signal.SIGKILL or "was ended by SIGKILL" in reason
        return is_kill and self._kills.killed(death.pid)

    def about(self, death: Death, reason: str, reckons: bool) -> str:
        """Return the end of a sentence on a death; empty where memory had no part in it.

        Args:
            reason: what the process said last.
            reckons: say what would fit.
        """
        is_error = reason.startswith(f": {OUT_OF_MEMORY}")
        if not is_error and not self.killed(death, reason):
            return ""
        if self._fit is None and reckons:
            self._fit = self._reckon(self._kills.limit_bytes(death.pid))
        killed = "" if is_error else ": out of memory, the kernel killed it"
        return f"{killed}{f'; {self._fit}' if self._fit else ''}"

    def _reckon(self, limit_bytes: int | None) -> str:
        """Reckon what would fit in a process of its own: it opens the data, and memory is scarce as it is."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send_fit, args=(theirs, self._path, self._ranks, limit_bytes), daemon=True)
        process.start()
        theirs.close()
        try:
            return str(ours.recv()) if ours.poll(RECKON_S) else ""
        except EOFError:  # it failed, and has said why in the launcher's output
            return ""
        finally:
            process.kill()
            process.join()
            ours.close()


def _send_fit(connection: Connection, path: Path, own_ranks: int, limit_bytes: int | None) -> None:
    connection.send(_what_would_fit(resolve(load_run_config(path / "config.yaml")), own_ranks, limit_bytes))


def _what_would_fit(run: ResolvedRun, own_ranks: int, limit_bytes: int | None) -> str:
    """Return what was predicted and which settings would take less, as the end of a sentence; empty: not known.

    Args:
        own_ranks: of this machine, as every machine has.
        limit_bytes: that these may have in all; None: not known.
    """
    ranks = own_ranks * run.nodes.most
    try:
        info = run.source.open().info
        now = _peak(run.config, ranks, info)
    except UserError:  # objects of the caller's own, which only the ranks have
        return ""
    if now is None:
        return ""
    text = f"predicted for each rank: {format_bytes(now)} at its peak, beyond about 0.4 GB of the process itself"
    if limit_bytes is not None:
        share = limit_bytes // max(1, own_ranks) - PROCESS_BYTES
        text += f"; {format_bytes(limit_bytes)} for {own_ranks} of them are allowed"
        if now <= share:
            return f"{text}, which would fit: data, code of one's own or another process takes the rest"
    needs = [
        _Need(flags, peak)
        for flags, config in smaller_settings(run.config, ranks)
        if (peak := _try(config, ranks, info))
    ]
    less = sorted((need for need in needs if need.peak_bytes < 0.95 * now), key=lambda need: need.peak_bytes)
    if limit_bytes is not None:
        less = [need for need in less if need.peak_bytes <= share] or less[:1]
    if not less:
        return f"{text}; use fewer ranks on this machine, or a smaller model"
    told = [f"{need.flags} ({format_bytes(need.peak_bytes)})" for need in less[-_MOST_TOLD:]]
    fits = "" if limit_bytes is None or less[0].peak_bytes <= share else ", which does not fit either"
    return f"{text}; less is needed with {', or '.join(told)}{fits}"


def smaller_settings(config: RunConfig, ranks: int) -> Iterator[tuple[str, RunConfig]]:
    """Yield settings that may need less memory, with their flags.

    Args:
        ranks: over which a model may be divided; 1: its layout stays.
    """
    training, strategy = config.training, config.strategy
    for times in (4, 16):
        count = training.accumulate * times
        yield f"--accumulate {count}", replace(config, training=replace(training, accumulate=count))
    size = config.data.batch_size
    yield f"--batch-size {size // 2}", replace(config, data=replace(config.data, batch_size=size // 2))
    if training.recompute == "none":
        yield "--recompute blocks", replace(config, training=replace(training, recompute="blocks"))
    if ranks > 1:
        parallel = f"fsdp={ranks}"
        yield f"--parallel {parallel}", replace(config, strategy=replace(strategy, parallel=parallel))


def _try(config: RunConfig, ranks: int, info: object) -> int | None:
    try:
        return _peak(config, ranks, info)
    except UserError:  # this combination is refused: it is no help
        return None


def _peak(config: RunConfig, ranks: int, info: object) -> int | None:
    from echelon.data.base import DataInfo
    from echelon.forecast.memory import forecast

    assert isinstance(info, DataInfo)
    predicted = forecast(resolve(config), info, ranks)
    return max((memory.peak for memory in predicted.memory), default=None)
