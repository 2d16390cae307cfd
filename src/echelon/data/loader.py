"""Loaders: a rank's part of every global batch, and of the evaluation set.

source = open_data(DataConfig("cifar10"), seed=0)
train = TrainLoader(source, LoaderConfig.of(config, seed=0, device=torch.device("cpu")), Shard(rank, world_size))
for batch in train.epoch(0):
    loss = loss_sum(model(batch.inputs), batch.targets) / batch.global_size
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import Batch, DataInfo, Shard, Source
from echelon.data.feed import BatchJob, Feed, Units
from echelon.data.order import Indices, global_batches, local_part
from echelon.data.recipe import LoaderConfig, make_rows
from echelon.tasks.nest import Nest

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

    Args:
        units: counts the units of a loss in targets, where these are not samples: batches whose targets lie in memory
            then know how many the global batch has.

    Raises:
        UserError: more ranks than samples, or than samples in a batch; settings that do not fit the data.
    """

    def __init__(self, source: Source, config: LoaderConfig, shard: Shard, units: Units | None = None) -> None:
        size, world = config.data.batch_size, shard.world_size
        if source.info.train_size < world:
            raise UserError(
                f"{source.info.name} has {source.info.train_size} training samples for {world} workers: use fewer"
            )
        if size < world:
            raise UserError(f"--batch-size {size} is smaller than the {world} workers: each needs at least one sample")
        self._config, self._shard, self._n = config, shard, source.info.train_size
        rows = make_rows(source.train, source.info, config, training=True)
        self._feed = Feed(rows, source.info, config, -(-min(size, self._n) // world), units)
        self.batches_per_epoch = -(-self._n // size)
        self._epoch: tuple[int, list[Indices]] | None = None

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Give the batches of an epoch from `start_batch` on; an iterator that is left early may be dropped.

        Raises:
            UserError: an image cannot be decoded, unless they are to be skipped.
            LoaderFailed: a loader process died, raised, or gave nothing in time.
        """
        batches = global_batches(self._n, self._config.data.batch_size, self._config.seed, epoch)
        jobs = [BatchJob(i, local_part(batch, self._shard), len(batch), batch) for i, batch in enumerate(batches)]
        return self._feed.run(epoch, jobs[start_batch:])

    def part(self, epoch: int, batch: int, shard: Shard) -> Batch:
        """Give any rank's part of one batch: for ranks that are told what to work on, in no order of their own."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, global_batches(self._n, self._config.data.batch_size, self._config.seed, epoch)
        indices = self._epoch[1][batch]
        (made,) = self._feed.run(epoch, [BatchJob(batch, local_part(indices, shard), len(indices), indices)])
        return made


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

    Raises:
        UserError: settings that do not fit the data.
    """

    def __init__(self, source: Source, config: LoaderConfig, shard: Shard) -> None:
        data = config.data
        size = data.eval_batch_size or -(-data.batch_size // shard.world_size)
        indices = local_part(np.arange(source.info.eval_size), shard)
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        self._jobs = [BatchJob(i, part, len(part)) for i, part in enumerate(parts)]
        rows = make_rows(source.evaluation, source.info, config, training=False)
        self._feed = Feed(rows, source.info, config, min(size, len(indices)))

    def __iter__(self) -> Iterator[Batch]:
        return self._feed.run(0, self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def blank(self) -> Nest:
        """Return the inputs of one sample of zeros, as batches have them."""
        return self._feed.blank()
