"""Data: sources by name, the order of samples, and loaders that keep the trainer busy."""

from echelon.data.base import Batch, DataInfo, Shard, Source
from echelon.data.loader import EvalLoader, LoaderConfig, TrainLoader
from echelon.data.own import example_inputs, from_datasets
from echelon.data.sources import SourceChoice, check_source, open_data

__all__ = [
    "Batch",
    "DataInfo",
    "EvalLoader",
    "LoaderConfig",
    "Shard",
    "Source",
    "SourceChoice",
    "TrainLoader",
    "check_source",
    "example_inputs",
    "from_datasets",
    "open_data",
]
