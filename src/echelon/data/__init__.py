"""Data: sources by name, the order of samples, and loaders that keep the trainer busy."""

from echelon.data.base import Batch, DataInfo, Shard, Source
from echelon.data.loader import EvalLoader, LoaderConfig, TrainLoader
from echelon.data.own import (
    OwnData,
    evaluation_digest,
    example_samples,
    from_datasets,
    name_of_data,
    samples_digest,
    source_of,
    stream_digests,
)
from echelon.data.sources import SourceChoice, check_source, open_data

__all__ = [
    "Batch",
    "DataInfo",
    "EvalLoader",
    "LoaderConfig",
    "OwnData",
    "Shard",
    "Source",
    "SourceChoice",
    "TrainLoader",
    "check_source",
    "evaluation_digest",
    "example_samples",
    "from_datasets",
    "name_of_data",
    "open_data",
    "samples_digest",
    "source_of",
    "stream_digests",
]
