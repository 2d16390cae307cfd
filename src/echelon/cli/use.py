"""`echelon predict` and `echelon serve`: a run's model on new samples."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.settings import parameter, trust_parameter, with_parameters
from echelon.core.errors import UserError
from echelon.core.units import seconds_for
from echelon.observe.screen import Screen
from echelon.storage.url import is_url

if TYPE_CHECKING:
    from echelon.inference.predict import PredictedRow
    from echelon.run.trained import TrainedModel

_TABLES = (".jsonl", ".csv", ".parquet")
_WIDEST = 60  # characters of a sample's name in the terminal's table


def predict_command() -> Any:
    """Build `echelon predict`."""

    def predict(run: str, files: list[str] | None, text: list[str] | None, out: str, masks: str, as_json: bool,
                checkpoint: str, device: str, trust: bool, workers: int, follow_links: bool,
                on_bad_image: str, **writing: Any) -> None:  # fmt: skip
        """Print or write what a run's model says of new samples."""
        from echelon import api

        skips = api.skips_bad_images(on_bad_image)
        if not files and not text:
            raise UserError("name files to predict, - for lines of standard input, or give texts with --text")
        if out:
            _check_out(Path(out))
        from echelon.inference import Text

        data: list[Path | str] = [*map(_named, files or ()), *map(Text, text or ())]
        rows: Iterable[PredictedRow]
        if workers == 1:
            trained, prints_here = (
                api.trained_model(run, checkpoint, trust, follow_links),
                not out and sys.stdout.isatty(),
            )
            rows = _predicted(trained, data, masks, device, writing, prints_here, skips)
        else:
            api.usable(run, checkpoint, trust, follow_links)
            _check_masks(run, masks)
            from echelon.tasks.base import Writing

            with Screen(to_stderr=True) as screen, screen.bar("predicting"):
                rows = api.predict(
                    run, data, masks or None, checkpoint, trust, device, Writing(**writing), workers, follow_links,
                    "skip" if skips else "stop",
                )  # fmt: skip
        if out:
            from echelon.inference.predict import write_table

            write_table(Path(out), list(rows))
            print(f"predictions: {out}")
        elif as_json:
            from echelon.inference.predict import json_line

            for row in rows:
                print(json_line(row))
        else:
            _print_table(rows)

    return as_command(with_parameters(predict, _predict_options()), "predict", COMMANDS["predict"][1])


def _predict_options() -> list[inspect.Parameter]:
    return [
        parameter("run", str, typer.Argument(..., metavar="RUN", help="the run's folder")),
        parameter("files", list[str], typer.Argument(
            None, metavar="[FILE...]",
            help="images, sounds, folders of these, tables, or texts with one a line, here or at a URL; "
            "-: lines of standard input")),
        parameter("text", list[str], typer.Option(None, "--text", help="a text, in place of a file; may be repeated")),
        parameter("out", str, typer.Option(
            "", "--out", metavar="FILE", help="write the predictions to this .jsonl, .csv or .parquet file")),
        parameter("masks", str, typer.Option(
            "", "--masks", metavar="FOLDER", help="where the masks of a segmentation are written")),
        parameter("as_json", bool, typer.Option(False, "--json", help="print one JSON object a line")),
        parameter("workers", int, typer.Option(
            1, "--workers", min=0, metavar="N",
            help="processes that share the work; 0: one per GPU, or per core [default: 1]")),
        parameter("follow_links", bool, typer.Option(
            False, "--follow-links", help="follow links that lead out of a folder")),
        parameter("on_bad_image", str, typer.Option(
            "stop", "--on-bad-image", metavar="stop|skip",
            help="of images and sounds that cannot be read; skip: their rows have an error alone [default: stop]")),
        *_model_options(),
    ]  # fmt: skip


def serve_command() -> Any:
    """Build `echelon serve`."""

    def serve(run: str, port: int, max_body: int, max_time_s: float, checkpoint: str, device: str, trust: bool,
              **writing: Any) -> None:  # fmt: skip
        """Answer requests for predictions until ctrl-c."""
        from echelon import api

        trained = api.trained_model(run, checkpoint, trust)
        from echelon.inference.predict import device_of
        from echelon.inference.serve import PredictionService, ServiceLimits, serve_predictions
        from echelon.reporting.live.server import HOST, listen
        from echelon.tasks.base import Writing

        limits = ServiceLimits(max_body * 10**6, max_time_s)
        service = PredictionService(trained, device_of(device), limits, Writing(**writing))
        with listen(port) as listener:
            place = f"http://{HOST}:{listener.getsockname()[1]}"
            line = f"{run} ({trained.task.name}): POST {place}/predict, GET {place}/health  (ctrl-c ends it)"
            serve_predictions(service, listener, lambda: print(line, flush=True))

    options = [
        parameter("run", str, typer.Argument(..., help="the run's folder")),
        parameter("port", int, typer.Option(
            8000, "--port", metavar="N", help="port of 127.0.0.1; 0: any free one [default: 8000]")),
        parameter("max_body", int, typer.Option(
            32, "--max-body", min=1, metavar="MB", help="the most that a request may hold [default: 32]")),
        parameter("max_time_s", float, typer.Option(
            "30s", "--max-time", parser=seconds_for("--max-time"), metavar="TIME",
            help="the most that a request may take [default: 30s]")),
        *_model_options(),
    ]  # fmt: skip
    return as_command(with_parameters(serve, options), "serve", COMMANDS["serve"][1])


def _model_options() -> list[Any]:
    return [
        parameter("checkpoint", str, typer.Option(
            "best", "--checkpoint", metavar="best|newest|STEP", help="the run's checkpoint to use [default: best]")),
        parameter("device", str, typer.Option(
            "auto", "--device", metavar="auto|cpu|cuda", help="where to compute [default: auto]")),
        parameter("most_tokens", int, typer.Option(
            100, "--tokens", min=1, metavar="N", help="tokens that a language model adds [default: 100]")),
        parameter("temperature", float, typer.Option(
            0.0, "--temperature", min=0.0, metavar="NUMBER",
            help="temperature at which they are drawn; 0: always the likeliest [default: 0]")),
        parameter("seed", int, typer.Option(0, "--seed", metavar="N", help="seed of these draws [default: 0]")),
        trust_parameter(),
    ]  # fmt: skip


def _check_out(path: Path) -> None:
    """Refuse a file for predictions whose suffix names no format, or that cannot be written, before torch is imported.

    Raises:
        UserError: says which.
    """
    if path.suffix.lower() not in _TABLES:
        raise UserError(f"--out {path}: predictions are written as {', '.join(_TABLES)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"--out {path}: it is a folder: name a file")
    try:
        with NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from error


def _named(file: str) -> Path | str:
    """Return a file, a URL of files, or the lines of standard input.

    Raises:
        UserError: it holds none, or no text.
    """
    from echelon.inference import Address, Lines

    if file != "-":
        return Address(file) if is_url(file) else Path(file)

    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("standard input is no UTF-8 text: give images, sounds and tables as files") from None
    if not text.strip():
        raise UserError("standard input is empty: it takes one text a line")
    return Lines(text)


def _predicted(
    trained: TrainedModel,
    data: list[Path | str],
    masks: str,
    device: str,
    writing: dict[str, Any],
    prints_here: bool,
    skips_bad: bool,
) -> Iterator[PredictedRow]:
    """Yield the rows, and show on standard error how far it is where that takes long.

    Args:
        prints_here: the rows are printed on the terminal, in whose way a bar would be.
        skips_bad: as `predict_samples`.
    """
    from echelon.inference.predict import MaskOutput, check_mask_folder, device_of, predict_samples
    from echelon.tasks.base import Writing

    folder = MaskOutput.of(masks) if masks else None
    check_mask_folder(trained, folder)
    with Screen(to_stderr=True, lines=prints_here) as screen, screen.bar("predicting, batch") as bar:

        def advance(batches: int) -> None:
            """Note that another batch begins, or that all are done."""
            bar.total, bar.done = batches, min(bar.done + 1, batches)

        writes, where = Writing(**writing), device_of(device)
        yield from predict_samples(trained, data, writes, where, folder, advance, skips_bad=skips_bad)


def _check_masks(run: str, masks: str) -> None:
    """Refuse, before anything is computed, a segmentation without a place for its masks (UserError)."""
    from echelon.records.file import newest
    from echelon.records.kinds import Start

    begun = next(newest(Path(run), Start), None) if not is_url(run) else None
    if begun is not None and begun.task.spec.startswith("segmentation") and not masks:
        raise UserError("this run predicts masks: name a folder for them with --masks")


def _print_table(rows: Iterable[PredictedRow]) -> None:
    """Print a line for each sample: what it is, what is said of it, and how surely."""
    for row in rows:
        name = str(row.sample)
        name = name if len(name) <= _WIDEST else f"…{name[1 - _WIDEST :]}"
        value = row.error or row.mask_file or row.prediction.value
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        if isinstance(value, list):
            text = ", ".join(map(str, value))
        sure = "" if row.prediction.probability is None else f"  {row.prediction.probability:.3f}"
        print(f"{name}  {'error: ' * bool(row.error)}{text}{sure}")
    sys.stdout.flush()
