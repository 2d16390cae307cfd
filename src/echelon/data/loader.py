"""Loaders: a rank's part of every global batch, and of the evaluation set.

source = open_data(DataConfig("cifar10"), seed=0)
train = TrainLoader(source, LoaderConfig.of(config, seed=0, device=torch.device("cpu")), Shard(rank, world_size))
for batch in train.epoch(0):
    loss = loss_sum(model(batch.inputs), batch.targets) / batch.global_size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.core.errors import UserError
from echelon.core.shares import share_sizes
from echelon.data.assemble import StreamRows
from echelon.data.base import Batch, DataInfo, Shard, Source
from echelon.data.drawn import DrawnSamples
from echelon.data.feed import BatchJob, Feed, Units
from echelon.data.mixing import Mixer, pairs_around
from echelon.data.order import Indices, batches_in_order, global_batches, grouped_batches, local_part
from echelon.data.recipe import LoaderConfig, make_rows
from echelon.data.weights import UNWEIGHTED, read_weights, weighted_batches, weights_name
from echelon.tasks.nest import Nest

if TYPE_CHECKING:
    from torch.utils.data import Dataset

__all__ = ["EvalLoader", "LoaderConfig", "TrainLoader", "size_note"]


class _Loader:
    _feed: Feed

    @property
    def bad_images(self) -> list[tuple[str, str]]:
        """Images that this rank could not decode: (path, reason), each once."""
        return self._feed.bad_images

    @property
    def loader_pids(self) -> list[int]:
        """Process ids of the loaders."""
        return list(self._feed.pool.pids) if self._feed.pool else []

    def close(self) -> None:
        """End the loader processes."""
        self._feed.close()


class TrainLoader(_Loader):
    """Gives a rank its part of each global batch; loader processes start here and live until `close`.

    The batches of an epoch depend on (seed, epoch) alone: neither on the number of ranks nor on that of loaders.

    Attributes:
        sampling: what tells its order of samples from another one.
        shard: this rank's part of each batch; `deal` changes it between two batches.

    Args:
        units: counts the units of a loss in targets, where these are not samples: batches whose targets lie in memory
            then know how many the global batch has.
        largest: samples of the largest part that this rank may be dealt; 0: one of equal parts.

    Raises:
        UserError: more ranks than samples, or than samples in a batch; settings that do not fit the data.
    """

    def __init__(
        self, source: Source, config: LoaderConfig, shard: Shard, units: Units | None = None, largest: int = 0
    ) -> None:
        size, world = config.data.batch_size, shard.world_size
        if source.info.train_size < world:
            raise UserError(
                f"{source.info.name} has {source.info.train_size} training samples for {world} workers: use fewer"
            )
        if size < world:
            raise UserError(f"--batch-size {size} is smaller than the {world} workers: each needs at least one sample")
        info, data = source.info, config.data
        self._config, self._n = config, info.train_size
        if data.decode == "gpu" and not config.decodes_on_gpu:
            raise UserError(
                "--decode gpu: this process trains on a CPU: use --decode cpu, or --device cuda where there is one"
            )
        rows = make_rows(source.train, info, config, training=True)
        self._lengths = rows.lengths
        self._in_order = isinstance(rows, StreamRows)
        if self._in_order and data.sample_weights != UNWEIGHTED:
            raise UserError(f"--sample-weights draws samples in any order, and {info.name} can only be iterated")
        self._weights = read_weights(data.sample_weights, info, rows.targets)
        self.sampling = weights_name(data.sample_weights, self._weights)
        self._mixer = Mixer(data, info, config.seed) if data.mixup or data.cutmix else None
        self._largest = largest or -(-min(size, self._n) // world)
        self._feed = Feed(rows, info, config, self._largest + 2 * (self._mixer is not None), units)
        self.deal(shard)
        self.batches_per_epoch = -(-self._n // size)
        self._stages = info.stages
        self._epoch: tuple[int, list[Indices]] | None = None

    def deal(self, shard: Shard) -> None:
        """Change this rank's part of each batch, from the next one on that is taken of a running epoch.

        All ranks call it between the same two batches, with the same weights: then the batches are what they were, and
        each sample of one is with one rank.

        Raises:
            ValueError: the part is larger than this loader has room for.
        """
        most, weights = min(self._config.data.batch_size, self._n), shard.weights or (1,) * shard.world_size
        if (part := -(-most * weights[shard.rank] // sum(weights))) > self._largest:
            raise ValueError(f"a part of {part} samples, and this loader has room for {self._largest}")
        self.shard = shard

    def epoch(self, epoch: int, start_batch: int = 0, begin: Callable[[Batch], None] | None = None) -> Iterator[Batch]:
        """Give the batches of an epoch from `start_batch` on; an iterator that is left early may be dropped.

        What was made ahead for parts that are dealt anew meanwhile is dropped.

        Args:
            begin: is told of each batch before the one before it is given.

        Raises:
            UserError: an image cannot be decoded, unless they are to be skipped.
            LoaderFailed: a loader process died, raised, or gave nothing in time.
        """
        batches = list(enumerate(self._batches(epoch)))
        while start_batch < len(batches):
            shard = self.shard
            made = self._made(epoch, [(number, batch, shard) for number, batch in batches[start_batch:]])
            for batch in made if begin is None else _begun_ahead(made, begin):
                start_batch += 1
                yield batch
                if self.shard is not shard:  # it was dealt anew
                    break

    def part(self, epoch: int, batch: int, shard: Shard) -> Batch:
        """Give any rank's part of one batch: for ranks that are told what to work on, in no order of their own."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._batches(epoch)
        (made,) = self._made(epoch, [(batch, self._epoch[1][batch], shard)])
        return made

    def batches_in(self, epoch: int) -> int:
        """Return the batches of an epoch: fewer than `batches_per_epoch` before the data grew."""
        return -(-self._samples_in(epoch) // self._config.data.batch_size)

    def steps_at_present_size(self, epoch: int, batch: int, step: int) -> int:
        """Return how many steps it would be to a batch of an epoch, had the data been as large from the beginning.

        Args:
            step: how many it was.
        """
        if not self._stages:
            return step
        return round((epoch + batch / self.batches_in(epoch)) * self.batches_per_epoch)

    def _samples_in(self, epoch: int) -> int:
        return next((stage.count for stage in reversed(self._stages) if stage.epoch <= epoch), self._n)

    def _batches(self, epoch: int) -> list[Indices]:
        """Return the draws of each global batch of an epoch."""
        size, seed = self._config.data.batch_size, self._config.seed
        if self._weights is not None:
            return weighted_batches(self._weights, size, seed, epoch)
        if self._in_order:
            return batches_in_order(self._n, size)
        if self._lengths is not None:
            return grouped_batches(self._lengths[: self._samples_in(epoch)], size, seed, epoch)
        return global_batches(self._samples_in(epoch), size, seed, epoch)

    def _made(self, epoch: int, wanted: Sequence[tuple[int, Indices, Shard]]) -> Iterator[Batch]:
        """Give parts of batches: each one's number in the epoch, its draws, and which part of it.

        Raises:
            UserError: a sample cannot be used; says in which batch.
        """
        given = 0

        def place() -> str:
            """Return which batch is being made."""
            number, _, shard = wanted[given]
            return f"rank {shard.rank}, batch {number + 1} of epoch {epoch + 1}"

        with _saying_where(place):
            for batch in self._mixed(epoch, wanted):
                yield batch
                given += 1

    def _mixed(self, epoch: int, wanted: Sequence[tuple[int, Indices, Shard]]) -> Iterator[Batch]:
        if self._mixer is None:
            jobs = [_job(number, draws, local_part(draws, shard), shard) for number, draws, shard in wanted]
            yield from self._feed.run(epoch, jobs)
            return
        slices = [pairs_around(len(draws), shard) for _, draws, shard in wanted]
        jobs = [
            _job(number, draws, draws[its.loaded], shard)
            for (number, draws, shard), its in zip(wanted, slices, strict=True)
        ]
        for batch, its in zip(self._feed.run(epoch, jobs), slices, strict=True):
            yield self._mixer.mix(batch, epoch, its.own)


def _job(number: int, draws: Indices, part: Indices, shard: Shard) -> BatchJob:
    """Return what is to be made for a rank; where its part has no samples, the first one of the batch is lent to it."""
    sizes = _uneven(len(draws), shard)
    return BatchJob(number, part if len(part) else draws[:1], len(draws), draws, sizes, borrowed=not len(part))


def _begun_ahead(batches: Iterator[Batch], begin: Callable[[Batch], None]) -> Iterator[Batch]:
    before: Batch | None = None
    for batch in batches:
        begin(batch)
        if before is not None:
            yield before
        before = batch
    if before is not None:
        yield before


def _uneven(samples: int, shard: Shard) -> tuple[int, ...]:
    return tuple(share_sizes(samples, shard.world_size, shard.weights)) if shard.weights else ()


@contextmanager
def _saying_where(place: Callable[[], str]) -> Iterator[None]:
    """Add to an error of making a batch which batch it was."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error} ({place()})") from error
    except Exception as error:
        error.add_note(place())
        raise


def size_note(info: DataInfo, batch_size: int) -> str:
    """Say that no batch is as large as described, for there are not so many samples; empty where some are.

    It is no mistake in itself: each step then takes the whole training set. The last batch of an epoch always holds
    what is left, and its loss is the mean over these.
    """
    if batch_size <= info.train_size:
        return ""
    return (
        f"--batch-size {batch_size} is more than the {info.train_size} training samples of {info.name}: "
        "each step takes all of them, an epoch is one step"
    )


class EvalLoader(_Loader):
    """Gives a rank its contiguous part of the evaluation set, once per iteration and unpadded; it may be empty.

    A batch's `global_size` is the size of this rank's batch: ranks have different numbers of batches.

    Attributes:
        first: place in the evaluation set of this rank's first sample.
        total: samples of the evaluation set, over all ranks.
        most: samples of the rank that has most.
        batch_size: samples of all batches but a rank's last one.

    Args:
        samples: in place of the source's evaluation set.
        part: `(number, count)`: only the batches of one part of so many; they are the same batches as of all.

    Raises:
        UserError: settings that do not fit the data.
    """

    def __init__(
        self,
        source: Source,
        config: LoaderConfig,
        shard: Shard,
        samples: Dataset[Any] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        data = config.data
        size = data.eval_batch_size or -(-data.batch_size // shard.world_size)
        samples = source.evaluation if samples is None else samples
        if isinstance(samples, DrawnSamples) and samples.at_once:
            size = min(size, samples.at_once)
        indices = local_part(np.arange(len(samples)), shard)  # type: ignore[arg-type]
        self.total = len(samples)  # type: ignore[arg-type]
        self.most = max(share_sizes(self.total, shard.world_size, shard.weights))
        self.batch_size = size
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        number, count = part
        parts = parts[len(parts) * number // count : len(parts) * (number + 1) // count]
        self.first = int(parts[0][0]) if parts else 0
        self._jobs, self._rank = [BatchJob(i, part, len(part)) for i, part in enumerate(parts)], shard.rank
        rows = make_rows(samples, source.info, config, training=False)
        self._feed = Feed(rows, source.info, config, min(size, len(indices)))
        self._example: Nest | None = None

    def __iter__(self) -> Iterator[Batch]:
        given = 0
        with _saying_where(lambda: f"rank {self._rank}, batch {given + 1} of the evaluation data"):
            for batch in self._feed.run(0, self._jobs):
                yield batch
                given += 1

    def __len__(self) -> int:
        return len(self._jobs)

    def example(self) -> Nest:
        """Return the inputs of one sample, as batches have them; call it before or after iterating, not meanwhile."""
        if self._example is None:
            (batch,) = self._feed.run(0, [BatchJob(0, np.arange(1), 1)])
            self._example = batch.inputs
        return self._example
