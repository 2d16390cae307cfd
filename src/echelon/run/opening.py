"""What the command that starts a run shows until the run's own display does: what is run, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from echelon.config import RunConfig
from echelon.core.own import continuing
from echelon.core.rate_search import STEPS
from echelon.core.stop import Stopped
from echelon.core.units import many
from echelon.launch.culprit import Living
from echelon.launch.plan import LaunchPlan
from echelon.observe.notes import SERVING, START, Note
from echelon.observe.screen import Bar, Screen
from echelon.run.foretold import Foretold, auto_in_words
from echelon.tasks.registry import AUTO

_START = "start: "
_UNTOLD = " (parameters: once torch is imported and it is built)"

NoteOf = Callable[[str, int], Note | None]  # of a process, by its name and process id


class Opening:
    """Says what begins, shows a bar while it starts, and again while it is started anew; `with Opening(...)`."""

    def __init__(self, config: RunConfig, plan: LaunchPlan, told: Foretold, resumes: bool = False) -> None:
        """Take what was asked for, and what is known of the model."""
        self._config, self._plan, self._told, self._resumes = config, plan, told, resumes
        self._folder = Path(config.run) if config.run else None
        self._screen = Screen()
        self._bars = ExitStack()
        self._bar: Bar | None = None
        self._begins = False

    def __enter__(self) -> Opening:
        """Say what is run, from what is known before anything heavy is imported."""
        self._screen.__enter__()
        self._screen.say(describe(self._config, self._plan, self._told))
        if self._folder is not None:
            self._say_where(self._folder)
        self._show(f"{_START}importing, checking")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bars.close()
        is_asked = kind is not None and issubclass(kind, Stopped | KeyboardInterrupt)
        if is_asked and self._folder is not None and not (self._begins or self._resumes):
            self.tells(f"stopped before it began: {self._folder} is not kept")
        self._screen.close()

    @contextmanager
    def rests(self) -> Iterator[None]:
        """Let no thread draw while the block forks this process; it shows what it showed before and after."""
        with self._screen.still():
            yield

    def runs_in(self, folder: Path) -> None:
        """Say where the run is, how it is stopped and how it goes on, unless that was said when it was asked for."""
        self._begins = True
        if self._folder is None:
            self._say_where(folder)
        if self._plan.node_rank is None:
            self._show(f"{_START}{many(self._plan.workers, 'worker')}")

    def _say_where(self, folder: Path) -> None:
        if self._plan.node_rank is not None:
            return  # on a place, whoever submitted it was told
        done = f" after step {self._told.done_steps:,}" if self._told.done_steps else ""
        where = f"continues in {folder}{done}" if self._resumes else f"run folder {folder}"
        stops = f"Ctrl-C stops it after a checkpoint, `{continuing(folder, self._told.objects)}` continues it"
        self._screen.say(f"{where}; {'Ctrl-C ends it' if self._config.optimizer.lr_find else stops}")

    def tells(self, text: str) -> None:
        """Say something, above the bar that is shown."""
        self._screen.say(f"echelon: {text}")

    def waits(self, reason: str) -> None:
        """Say what is waited for; it stays to be seen, with how long."""
        self.tells(reason)
        self._show(reason)

    def look(self, living: Sequence[Living], note: NoteOf, first_machine: bool) -> None:
        """Show that the processes start, until they work; on other machines than the first, how far they are."""
        notes = [note(p.name, p.pid) for p in living if p.name.startswith(("rank", "worker"))]
        working = [n for n in notes if n is not None and n.activity not in (START, SERVING)]
        if not working:
            if notes and self._bar is None:  # where only servers live on, the run ends
                self._show(f"{_START}{many(self._plan.workers, 'worker')}")
        elif first_machine:
            self.leaves()
        else:
            self._show("the first machine shows the run; here", f"step {max(n.step for n in working)}")

    def leaves(self) -> None:
        """Show nothing more: the run's own display does."""
        self._bars.close()
        self._bar = None

    def _show(self, name: str, text: str = "") -> None:
        if self._bar is not None and self._bar.name.startswith(_START) and name.startswith(_START):
            self._bar.name = name  # one clock, from the first thing that a start takes to the last
        elif self._bar is None or self._bar.name != name:
            self._bars.close()
            self._bar = self._bars.enter_context(self._screen.bar(name))
        self._bar.text = text


def describe(config: RunConfig, plan: LaunchPlan, told: Foretold) -> str:
    """Return what a run is, in one line, from its description alone."""
    length = f"{config.training.epochs} epochs" if config.training.epochs > 1 else "1 epoch"
    if config.optimizer.lr_find:
        length = f"{STEPS} steps to find a learning rate,"
    if config.training.max_steps:
        length += f" (at most {many(config.training.max_steps, 'step')})"
    size = f" of {told.parameters:,} parameters" if told.parameters else _UNTOLD
    return (
        f"{config.data.source}, model {told.model}{size}; {_ways(config, plan.workers, plan.nodes.most)}; "
        f"{length} of batches of {config.data.batch_size}"
    )


def describe_untold(config: RunConfig, workers: int, machines: int) -> str:
    """Return what is known of a run while the data is read that tells its task, model and length."""
    where = f"run folder {config.run}" if config.run else "a new run folder in runs/"
    ways = _ways(config, workers, machines)
    return (
        f"{config.data.source}, model {auto_in_words(config)}; {ways}; {where}; Ctrl-C before it begins leaves nothing "
        f"behind; reading the data, which tells {'' if config.task != AUTO else 'task, '}parameters and length"
    )


def _ways(config: RunConfig, workers: int, machines: int) -> str:
    """Return workers, layout and sync, and a codec that somebody chose."""
    strategy, default = config.strategy, RunConfig().strategy
    ways = [strategy.sync, *([strategy.compression] if strategy.compression != default.compression else [])]
    where = f" on each of {machines} machines" if machines > 1 else ""
    is_default = strategy.parallel == default.parallel
    layout = f"dp={workers * machines}" if is_default else strategy.parallel
    told = "" if is_default and workers * machines == 1 else f" ({layout})"
    return f"{many(workers, 'worker')}{where}{told}, {', '.join(ways)}"
