"""What a run's model says of new samples, in batches, as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import csv, parquet

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.json_values import finite
from echelon.data import EvalLoader, LoaderConfig, Shard
from echelon.data.decode import open_picture
from echelon.data.masks import mask_of_image
from echelon.inference.samples import Samples, samples_of
from echelon.run.trained import TrainedModel
from echelon.tasks import nest
from echelon.tasks.base import Encoding, Prediction, Writing
from echelon.tasks.nest import Nest
from echelon.tasks.segmentation import shares_of

_MOST_NAMED = 1000  # classes whose probabilities all stand in a row
_FEW = 64  # samples, which this process loads itself: starting others takes longer


@dataclass(frozen=True)
class BatchShare:
    """Which part of all batches is predicted."""

    number: int = 0
    count: int = 1


_ALL = BatchShare()


@dataclass(frozen=True)
class PredictedRow:
    """One sample, and what the model says of it.

    Attributes:
        sample: its file, its text, or the number of its row, from 1.
        mask_file: that its mask was written to; empty: it has none.
        error: why the sample could not be read, of which nothing is predicted; empty: it could.
    """

    sample: str | int
    prediction: Prediction
    mask_file: str = ""
    error: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        prediction, value = self.prediction, self.prediction.value
        row: dict[str, Any] = {"sample": self.sample}
        if self.error:
            return {**row, "error": self.error}
        if prediction.mask is None and not self.mask_file:
            row["prediction"] = value
        else:
            row |= {"mask": self.mask_file, "shares": value}
        if prediction.probability is not None:
            row["probability"] = prediction.probability
        if 0 < len(prediction.probabilities) <= _MOST_NAMED:
            row["probabilities"] = dict(prediction.probabilities)
        return row

    def flat(self) -> dict[str, Any]:
        """Return it as one row of a table: what is by name has a column for each name."""
        row: dict[str, Any] = {}
        for name, value in self.plain().items():
            if isinstance(value, Mapping):
                row |= {f"{name.removesuffix('ies') + 'y' if name == 'probabilities' else name}_{k}": v
                        for k, v in value.items()}  # fmt: skip
            else:
                row[name] = "|".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        return row


def device_of(name: str) -> torch.device:
    """Return the device of a name; `auto` is a GPU where there is one.

    Raises:
        UserError: there is none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: it is auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU here that torch can use")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class MaskOutput:
    """Where masks are written to.

    Attributes:
        taken: names of files that were there before.
    """

    path: Path
    taken: frozenset[str] = frozenset()

    @classmethod
    def of(cls, path: str | Path) -> MaskOutput:
        """Return a folder with what is in it now."""
        folder = Path(path)
        return cls(folder, frozenset(each.name for each in folder.iterdir()) if folder.is_dir() else frozenset())

    def files(self, names: Sequence[str | int]) -> list[Path]:
        """Return a file for each sample's mask: under its name, numbered where that is taken."""
        taken, files = set(self.taken), []
        for name in (Path(str(each)).stem for each in names):
            file, number = f"{name}.png", 1
            while file in taken:
                file, number = f"{name}-{number}.png", number + 1
            taken.add(file)
            files.append(self.path / file)
        return files


def check_mask_folder(trained: TrainedModel, masks: MaskOutput | None) -> None:
    """Refuse a segmentation that has no place for its masks.

    Raises:
        UserError: says how to name one.
    """
    if trained.task.encoding is Encoding.MASKS and masks is None:
        raise UserError("this run predicts masks: name a folder for them with --masks")


def predict_samples(
    trained: TrainedModel,
    data: Any,
    writing: Writing,
    device: torch.device,
    masks: MaskOutput | None = None,
    advance: Callable[[int], None] = lambda batches: None,
    part: BatchShare = _ALL,
    skips_bad: bool = False,
) -> Iterator[PredictedRow]:
    """Yield what a model says of each sample, in their order.

    Args:
        data: see `samples_of`.
        masks: folder that masks of images are written to, as PNG of class numbers under the images' names.
        advance: is called with the number of batches, before the first and after each.
        part: of the batches; whatever their number, they are the same ones.
        skips_bad: of an image or a sound that cannot be read, yield the reason.

    Raises:
        UserError: the samples are not of the run's kind, or one cannot be read: names it.
    """
    samples = samples_of(trained, data)
    config = trained.config.data
    described = replace(config, on_bad_image="skip", on_nan="stop")  # each sample has its row
    if len(samples.names) <= _FEW:
        described = replace(described, loaders=0)
    settings = LoaderConfig.of(described, trained.config.training.seed, device, trained.transforms)
    loader = EvalLoader(samples.source, settings, Shard(0, 1), part=(part.number, part.count))
    mask_files = masks.files(samples.names) if masks is not None else None
    model = trained.model.to(device)

    def outputs_of(inputs: Nest) -> Nest:
        """Return what the model makes of inputs."""
        return nest.exact(nest.call(model, nest.to_device(inputs, device)))

    place = loader.first
    try:
        advance(len(loader))
        with torch.inference_mode():
            for batch in loader:
                rows = nest.rows(batch.targets)
                said = iter(trained.task.predict(outputs_of, batch.inputs, writing) if rows else ())
                for i in range(rows + len(batch.left_out)):
                    if i not in batch.left_out:
                        yield _row(samples, place, next(said), mask_files)
                    elif skips_bad:
                        yield PredictedRow(_name(samples, place), Prediction(None), error=batch.left_out[i])
                    else:
                        raise UserError(
                            f"{samples.names[place]}: cannot be read ({batch.left_out[i]}): replace or leave it out; "
                            "with --on-bad-image skip its row says so"
                        )
                    place += 1
                advance(len(loader))
    finally:
        loader.close()


def _name(samples: Samples, place: int) -> str | int:
    name = samples.names[place]
    return name.encode("utf-8", "replace").decode() if isinstance(name, str) else name  # of a file in another encoding


def _row(samples: Samples, place: int, prediction: Prediction, mask_files: Sequence[Path] | None) -> PredictedRow:
    name, mask = _name(samples, place), prediction.mask
    if mask is None:
        return PredictedRow(name, prediction)
    if samples.files:
        mask = mask_of_image(mask, open_picture(samples.files[place]))
        prediction = replace(prediction, value=shares_of(mask, list(prediction.value)), mask=mask)  # without padding
    if mask_files is None:
        return PredictedRow(name, prediction)
    _write_mask(mask, mask_files[place])
    return PredictedRow(name, replace(prediction, mask=None), str(mask_files[place]))  # masks of all are too many


def _write_mask(mask: NDArray[np.uint8], file: Path) -> None:
    """Write a mask as PNG.

    Raises:
        UserError: the folder cannot be written.
    """
    from PIL import Image

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{uuid4().hex}.png")
        Image.fromarray(mask).save(unfinished)
        unfinished.rename(file)
    except OSError as error:
        raise UserError(f"--masks {file.parent}: cannot be written ({error.strerror or error})") from error


def write_table(path: Path, rows: Sequence[PredictedRow]) -> None:
    """Write predictions as the file's suffix says, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.stem}-{uuid4().hex}{path.suffix}")
    try:
        if path.suffix.lower() == ".jsonl":
            write_atomic(path, "".join(json_line(row) + "\n" for row in rows))
            return
        flat = [row.flat() for row in rows]
        names = list(dict.fromkeys(name for row in flat for name in row))  # a sample that was not read lacks some
        table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in flat])
        if path.suffix.lower() == ".csv":
            csv.write_csv(table, unfinished)
        else:
            parquet.write_table(table, unfinished)
        unfinished.rename(path)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror or error})") from error
    finally:
        unfinished.unlink(missing_ok=True)


def json_line(row: PredictedRow) -> str:
    """Return a row as one line of JSON; a number that is none is null."""
    return json.dumps(finite(row.plain()), ensure_ascii=False)
