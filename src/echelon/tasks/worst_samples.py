"""The images of the evaluation set that a model predicts worst, as small pictures for a report.

The k samples of the highest loss are the same however ranks divide the set: each rank has its own k at most, their
numbers are gathered, and of equal losses the earlier sample comes first. Memory is that of k thumbnails.

Shapes: B samples of a batch, C classes, k samples chosen, P bytes of a thumbnail.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.figure import ReportPicture, ReportSection
from echelon.tasks import nest
from echelon.tasks.base import PendingSection
from echelon.tasks.nest import Nest, TensorSpec

_SIDE = 96
_PNG_SIDE = 40  # up to it a PNG is as small as a JPEG, and exact
_JPEG_QUALITY = 82
_SCORES = 7  # of a sample: loss, place, number, true class, predicted class, its probability, that of the true class


@dataclass(frozen=True)
class Pixels:
    """How a model's inputs become pictures again.

    Attributes:
        shape: channels (1 or 3), height and width of an input.
        mean: per channel, of pixels in 0..1, as inputs were normalised with; empty: they were not, and each picture is
            stretched from its least value to its greatest.
        std: likewise.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, inputs: Nest, mean: Sequence[float], std: Sequence[float]) -> Pixels | None:
        """Return it for the specs of a model's inputs; None where these are no images."""
        if not isinstance(inputs, TensorSpec) or len(inputs.shape) != 3 or inputs.shape[0] not in (1, 3):
            return None
        channels, height, width = inputs.shape
        return cls((channels, height, width), tuple(mean), tuple(std))

    @property
    def thumbnail(self) -> tuple[int, int, int]:
        """The shape of a picture: the longer side at most 96 pixels."""
        channels, height, width = self.shape
        scale = min(1.0, _SIDE / max(height, width))
        return channels, max(1, round(height * scale)), max(1, round(width * scale))

    def thumbnails(self, images: Tensor) -> Tensor:
        """Return inputs `(B, channels, height, width)` as pictures, uint8 on the CPU."""
        wide = images.detach().float()
        if self.mean:
            mean, std = (wide.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
            wide = wide * std + mean
        else:
            low, high = wide.amin((1, 2, 3), keepdim=True), wide.amax((1, 2, 3), keepdim=True)
            wide = (wide - low) / (high - low).clamp(min=1e-12)
        if self.thumbnail != self.shape:
            wide = F.interpolate(wide, self.thumbnail[1:], mode="area")
        return (wide.nan_to_num(0.0).clamp(0, 1) * 255).round().to("cpu", torch.uint8)


class Pictures(Protocol):
    """How a model's inputs become pictures."""

    @property
    def thumbnail(self) -> tuple[int, int, int]:
        """The shape of a picture: channels, height, width."""

    def thumbnails(self, inputs: Nest) -> Tensor:
        """Return inputs of B samples as pictures `(B, *thumbnail)`, uint8 on the CPU."""


@dataclass(frozen=True)
class WorstOfAll:
    """The worst of all ranks, the worst first.

    Attributes:
        scores: their numbers `(n, columns)`.
        pictures: returns theirs `(n, *thumbnail)` on the group's first rank, once `works` are done; None on others.
        works: pictures on their way.
    """

    scores: Tensor
    pictures: Callable[[], Tensor] | None
    works: Sequence[dist.Work] = ()

    def section(self, make: Callable[[Tensor, Tensor], ReportSection]) -> PendingSection:
        """Return the section that is made of `scores` and `pictures`, in their shapes; none of no samples."""

        def made() -> ReportSection | None:
            """Make it on the first rank."""
            return make(self.scores, self.pictures()) if self.pictures is not None and len(self.scores) else None

        return PendingSection(made, self.works)


class Worst:
    """Keeps numbers and a picture of each of the k samples of the highest loss.

    Args:
        limit: k.
        columns: numbers of a sample; the first is its loss, the second its place in the evaluation set.
        thumbnail: shape of a picture.
    """

    def __init__(self, limit: int, columns: int, thumbnail: tuple[int, int, int]) -> None:
        self._limit, self._thumbnail = limit, thumbnail
        self._scores = torch.zeros(0, columns, dtype=torch.float64)
        self._pictures = torch.zeros(0, *thumbnail, dtype=torch.uint8)

    def add(self, scores: Tensor, pictures: Tensor) -> None:
        """Take the worst k of those that were kept and some more: `(n, columns)` and `(n, *thumbnail)` uint8."""
        scores = torch.cat([self._scores, scores.double().cpu()])
        order = _worst_first(scores)[: self._limit]
        self._scores, self._pictures = scores[order], torch.cat([self._pictures, pictures])[order]

    def of_all(self, group: dist.ProcessGroup | None) -> WorstOfAll:
        """Return all ranks' worst, the worst first; all ranks of `group` call it.

        The numbers of all ranks' samples are gathered, then the pictures of the worst of them set out to the first
        rank, which alone shows them.
        """
        if group is None:
            return WorstOfAll(self._scores, lambda: self._pictures)
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
        rank, size, blank = dist.get_rank(group), dist.get_world_size(group), -torch.inf
        mine = torch.full((self._limit, self._scores.shape[1]), blank, dtype=torch.float64)
        mine[: len(self._scores)] = self._scores
        rows = [torch.empty_like(mine, device=device) for _ in range(size)]
        dist.all_gather(rows, mine.to(device), group=group)
        scores = torch.cat(rows).cpu()
        order = _worst_first(scores)
        order = order[scores[order, 1] >= 0][: self._limit]
        owners, own = order // self._limit, order % self._limit
        most = int(torch.bincount(owners, minlength=size)[1:].max())  # the first rank has its own
        if most == 0:
            return WorstOfAll(scores[order], (lambda: self._pictures[own]) if rank == 0 else None)
        sent = torch.zeros(most, *self._thumbnail, dtype=torch.uint8)
        if rank:
            wanted = self._pictures[own[owners == rank]]
            sent[: len(wanted)] = wanted
        sent = sent.to(device)
        received = [torch.empty_like(sent) for _ in range(size)] if rank == 0 else None
        work = dist.gather(sent, received, group=group, group_dst=0, async_op=True)
        assert work is not None
        if received is None:
            return WorstOfAll(scores[order], None, [work])
        return WorstOfAll(scores[order], partial(self._joined, owners, own, received), [work])

    def _joined(self, owners: Tensor, own: Tensor, received: Sequence[Tensor]) -> Tensor:
        """Return the pictures in the order of their numbers, from what each rank has sent."""
        pictures = torch.zeros(len(owners), *self._thumbnail, dtype=torch.uint8)
        for rank, sent in enumerate(received):
            its = owners == rank
            pictures[its] = sent[: int(its.sum())].cpu() if rank else self._pictures[own[its]]
        return pictures


class WorstSamples:
    """Chooses the k samples of the highest loss among those of all ranks.

    Args:
        limit: k.
        classes: names of the C classes.
        pixels: how inputs become pictures.
        losses: of logits `(B, C)` and class numbers `(B,)`, the loss of each sample `(B,)`.
    """

    def __init__(
        self, limit: int, classes: Sequence[str], pixels: Pictures, losses: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._limit, self._classes, self._pixels, self._losses = limit, classes, pixels, losses
        self._worst = Worst(limit, _SCORES, pixels.thumbnail)

    def update(self, inputs: Nest, outputs: Tensor, targets: Tensor, first: int, numbered: bool) -> None:
        """Look at a batch, logits `(B, C)` and class numbers `(B,)`; B may be 0.

        Args:
            first: place of its first sample in the evaluation set.
            numbered: whether that is also its number there; not where some could not be decoded.
        """
        if not len(targets):
            return
        logits, wanted = outputs.detach().double(), targets.detach()
        losses = self._losses(logits, wanted).nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst = losses.sort(descending=True, stable=True).indices[: self._limit]
        chances, wanted = logits[worst].softmax(1).nan_to_num(0.0), wanted[worst]
        highest, predicted = chances.max(1)
        places = worst + first
        numbers = places if numbered else torch.full_like(places, -1)
        columns = [losses[worst], places, numbers, wanted, predicted, highest, chances.gather(1, wanted[:, None])[:, 0]]
        scores = torch.stack([column.double() for column in columns], 1)
        self._worst.add(scores, self._pixels.thumbnails(nest.take(inputs, worst)))

    def section(self, group: dist.ProcessGroup | None = None) -> PendingSection:
        """Begin to bring together the pictures of all ranks' worst samples; all ranks of `group` call it."""
        return self._worst.of_all(group).section(self._section)

    def _section(self, scores: Tensor, pictures: Tensor) -> ReportSection:
        shown = [self._picture(row, image.numpy()) for row, image in zip(scores.tolist(), pictures, strict=True)]
        note = (
            f"The {len(shown)} samples of the evaluation set with the highest loss, the highest first, "
            "as the model sees them. --worst-samples sets how many; 0 leaves them out of the report."
        )
        return ReportSection("Worst-predicted samples", pictures=shown, notes=[note])

    def _picture(self, row: list[float], image: NDArray[np.uint8]) -> ReportPicture:
        loss, _, number, wanted, predicted, highest, chance = row
        true, said = self._classes[int(wanted)], self._classes[int(predicted)]
        which = f", sample {int(number)} of the evaluation data" if number >= 0 else ""
        chances = f"{said}: {highest:.1%}" + (f", {true}: {chance:.1%}" if said != true else "")
        lines = (f"true {true}, predicted {said}", chances, f"loss {loss:.3g}{which}")
        return ReportPicture(data_uri(image), lines)


def _worst_first(scores: Tensor) -> Tensor:
    """Return the order of rows by falling loss; of equal ones the earlier place comes first."""
    by_place = scores[:, 1].sort(stable=True).indices
    return by_place[scores[by_place, 0].sort(descending=True, stable=True).indices]


def data_uri(image: NDArray[np.uint8]) -> str:
    """Return a picture `(1 or 3, height, width)` as the address of itself: a PNG, or where it is larger a JPEG."""
    from PIL import Image

    rows = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    kind = "png" if max(rows.shape[:2]) <= _PNG_SIDE else "jpeg"
    packed = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rows)).save(packed, kind, quality=_JPEG_QUALITY, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(packed.getvalue()).decode()}"
