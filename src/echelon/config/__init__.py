"""The description of a run: frozen dataclasses, YAML and overrides, each value's origin. Imports no torch."""

from echelon.config.build import Resolved, build, load_run_config, to_yaml
from echelon.config.schema import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LaunchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Resolved",
    "RunConfig",
    "StrategyConfig",
    "TrainingConfig",
    "build",
    "load_run_config",
    "to_yaml",
]
