"""Data by the measures of a run: what it measured of its own is what its model knows inputs and targets by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.core.units import first_few
from echelon.data.base import CLASS_NUMBER, DataInfo, DataRequest, Source
from echelon.data.images import ImageArray, LabelledImages, TensorArray
from echelon.data.kept_info import read_info
from echelon.data.sounds import SoundFiles, at_rate


def measures_for(request: DataRequest) -> DataInfo | None:
    """Return what the run that `data.measures` names keeps of its data; None: none is named.

    A run that goes on has its own, which were that one's.

    Raises:
        UserError: that run keeps nothing, or it cannot be read.
    """
    name = request.config.measures
    if not name:
        return None
    own = None if request.folder is None else read_info(request.folder)
    if own is None and (own := read_info(Path(name).expanduser())) is None:
        raise UserError(f"--measures {name}: no run that keeps what it measured of its data (data.json)")
    return replace(own, image_size=request.config.image_size or own.image_size)


def measured_as(source: Source, measures: DataInfo) -> Source:
    """Return data with the measures of other data: size and means of images, rate of sounds, units of targets, classes.

    What data would be by its own measure is another input, or another target, in the same place.
    """
    source = with_classes(source, measures.classes)
    info = source.info
    if info.mean and measures.mean:
        info = replace(
            info, channels=measures.channels, image_size=measures.image_size, mean=measures.mean, std=measures.std
        )
    if info.target_mean and len(info.target_mean) == len(measures.target_mean):
        info = replace(info, target_mean=measures.target_mean, target_std=measures.target_std)
    if info.rate == measures.rate or not isinstance(source.evaluation, SoundFiles):
        return replace(source, info=info)

    def heard(part: Any) -> Any:
        """Return sounds at the rate."""
        return at_rate(part, measures.rate) if isinstance(part, SoundFiles) else part

    parts = {name: heard(getattr(source, name)) for name in ("train", "evaluation", "test")}
    return replace(source, info=replace(info, rate=measures.rate), **parts)


def with_classes(source: Source, classes: tuple[str, ...]) -> Source:
    """Return data of one class a sample with its classes numbered by their names among others, where all are there.

    Data with classes that are not among them stays as it is, and so does data whose items themselves hold the numbers.
    """
    info = source.info
    is_part = bool(info.classes) and set(info.classes) <= set(classes)
    if info.classes == classes or info.targets != CLASS_NUMBER or not is_part:
        return source
    numbers = np.array([classes.index(name) for name in info.classes], np.int64)
    parts = {name: _renumbered(getattr(source, name), numbers) for name in ("train", "evaluation")}
    if source.test is not None:
        parts["test"] = _renumbered(source.test, numbers)
    if None in parts.values():
        return source
    counts = dict(zip(info.classes, info.class_counts, strict=False))
    info = replace(info, classes=classes, class_counts=tuple(counts.get(name, 0) for name in classes))
    absent = [name for name in classes if name not in counts]
    notes = (f"data {info.name} has no sample of {first_few(absent)}",) if absent else ()
    return replace(source, info=info, notes=(*source.notes, *notes), **parts)


def _renumbered(part: Any, numbers: NDArray[np.int64]) -> Any:
    """Return samples of other class numbers; None: their items hold them."""
    if isinstance(part, SoundFiles):
        return replace(part, files=replace(part.files, labels=numbers[part.labels]))
    if isinstance(part, TensorArray):
        return replace(part, targets=numbers[part.targets])
    if isinstance(part, LabelledImages | ImageArray):
        return replace(part, labels=numbers[part.labels])  # type: ignore[type-var]
    return None
