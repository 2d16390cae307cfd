"""A run's `summary.json` as those read it who show or compare runs: its numbers by name, whatever version wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from echelon.core.errors import UserError
from echelon.records.decode import decode, readable_rows

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class PredictedStep:
    """What a run predicted of another way to communicate.

    Attributes:
        settings: of that way, by their names.
        then_s: seconds of a step.
    """

    settings: Mapping[str, str]
    then_s: float


_predictions = readable_rows(partial(decode, PredictedStep))


@dataclass(frozen=True)
class RunSummary:
    """What came of a run; what its version did not know is None or empty.

    Attributes:
        message: why it failed or stopped.
        metrics: of the last evaluation, the primary one first; None where one could not be computed.
        best: value of the primary metric whose weights are kept, of step `best_step`.
        tested: `metrics` are those of a test set.
        wall_s: seconds of all its commands.
        epochs: that were trained.
        samples_per_s, wire_bytes_per_step: of its steps, all ranks together.
        inner_axes: that a replica is spread over, inside of which bytes are not counted.
        words: what its report says in closing.
        predictions: of other ways to communicate; rows that cannot be read are left out.
    """

    message: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    tested: bool = False
    wall_s: float | None = None
    epochs: float | None = None
    steps: int | None = None
    workers: int | None = None
    samples_per_s: float | None = None
    wire_bytes_per_step: float | None = None
    inner_axes: Sequence[str] = ()
    words: Sequence[str] = ()
    predictions: Annotated[Sequence[PredictedStep], _predictions] = ()

    @classmethod
    def of(cls, values: Mapping[str, object]) -> RunSummary:
        """Return it from the values of its file, in which the best result has its metric's name: `best_top1`.

        Raises:
            UserError: a value is not what it should be.
        """
        metrics = values.get("metrics")
        primary = next(iter(metrics), "") if isinstance(metrics, Mapping) else ""
        try:
            return decode(cls, {**values, "best": values.get(f"best_{primary}")})
        except (TypeError, ValueError) as error:
            raise UserError(f"{SUMMARY_FILE} cannot be read ({error}): `echelon report` writes it again") from error


def read_summary(folder: Path) -> Mapping[str, object]:
    """Return the values of a run's summary by name, as `RunSummary.of` takes them; empty: it has none yet.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    file = folder / SUMMARY_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): `echelon report` writes it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{file} holds no numbers by name: `echelon report` writes it again")
    return values
