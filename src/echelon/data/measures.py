"""Data by the measures of a run: what it measured of its own is what its model knows inputs and targets by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.core.errors import UserError
from echelon.data.base import DataInfo, DataRequest, Source
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
    """Return data with the measures of other data: size and means of images, rate of sounds, units of targets.

    What data would be by its own measure is another input, or another target, in the same place.
    """
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
