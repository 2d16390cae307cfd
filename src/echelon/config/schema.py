"""What a run is, as frozen dataclasses. Each field's help text is also its command-line help.

A field's command-line flag is its name with dashes (`batch_size` is `--batch-size`), unless `flag` names another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")


def setting(
    default: Any,
    help: str,
    flag: str | None = None,
    above: float | None = None,
    below: float | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """Declare one field: default, help, flag; `above` and `below` are inclusive bounds, checked for numbers.

    `renamed`: values that runs were written with before, and what they are called now.
    """
    metadata = {"help": help, "flag": flag, "min": above, "max": below, "renamed": renamed or {}}
    return field(default=default, metadata=metadata)


def code_setting(default: str, help: str, flag: str) -> Any:
    """Declare a field whose value may be `module:name`: code that a run imports."""
    metadata: dict[str, Any] = {"help": help, "flag": flag, "min": None, "max": None, "renamed": {}, "code": True}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where samples come from and how they are batched."""

    source: str = code_setting(
        "digits", "digits, an image folder, a torchvision data set name, or module:function", "DATA"
    )
    root: str = setting("data", "folder for downloaded torchvision data sets", "--data-root")
    batch_size: int = setting(128, "samples per optimizer step over all workers (global batch)", above=1)
    eval_batch_size: int = setting(0, "samples per evaluation step and worker; 0: as in training", above=0)
    image_size: int = setting(0, "side of the square image in pixels; 0: from the data (ImageNet-sized: 224)", above=0)
    follow_links: bool = setting(False, "use links in the data folder that lead out of it")
    augment: Literal["auto", "none", "flip_crop", "imagenet"] = setting(
        "auto", "augmentation: auto (by image size), none, flip_crop (pad and crop), imagenet (random resized crop)"
    )
    holdout: float = setting(
        0.2, "share held out for evaluation when the data has no val/ or test/", above=0.01, below=0.9
    )
    loaders: int = setting(
        -1, "loading processes per worker; 0: in the worker itself; -1: chosen from the data", above=-1
    )
    on_bad_image: Literal["stop", "skip"] = setting(
        "stop", "an image that cannot be decoded: stop, or skip and count it"
    )


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The network."""

    name: str = code_setting(
        "auto", "auto, a built-in (mlp, small_cnn, resnet20), timm/NAME, torchvision/NAME or module:function", "--model"
    )
    weights: str = setting("", "file of weights to start from (safetensors, or a torch state dict)")
    sync_batchnorm: bool = setting(False, "BatchNorm statistics over the whole global batch")
    compile: bool = setting(False, "torch.compile the model")
    channels_last: Literal["auto", "on", "off"] = setting("auto", "memory layout of images; auto: on for GPUs")


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Optimizer, schedule and loss; names are timm's."""

    name: str = setting("sgd", "timm optimizer: sgd (Nesterov), momentum, adamw, lars, lamb, ...", "--optimizer")
    lr: float = setting(0.1, "learning rate", above=0)
    momentum: float = setting(0.9, "momentum (SGD family)", above=0, below=1)
    weight_decay: float = setting(5e-4, "weight decay; none on biases and normalisation", above=0)
    schedule: Literal["cosine", "step", "poly", "constant"] = setting("cosine", "learning-rate schedule")
    step_epochs: float = setting(30.0, "epochs between drops by 10 of the step schedule", above=0)
    warmup_epochs: float = setting(0.0, "epochs of linear warm-up", above=0)
    scale_lr: int = setting(0, "multiply lr by batch_size / this (linear scaling); 0: off", above=0)
    clip_norm: float = setting(0.0, "clip the gradient's norm at this; 0: off", above=0)
    label_smoothing: float = setting(0.0, "label smoothing", above=0, below=1)
    class_weights: str = setting("none", "none, balanced, or a comma-separated list with one weight per class")


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How long, how precisely, from which seed."""

    epochs: int = setting(10, "passes over the training data", above=1)
    max_steps: int = setting(0, "stop after this many optimizer steps; 0: no limit", above=0)
    accumulate: int = setting(1, "micro-batches that a worker's part of a batch is cut into", above=1)
    precision: Literal["fp32", "bf16", "bf16-params", "fp16", "fp8"] = setting(
        "fp32",
        "fp32, bf16 (autocast), bf16-params (float32 masters), fp16 (autocast, scaled losses) or fp8 (torchao, a GPU)",
    )
    tf32: Literal["auto", "on", "off"] = setting(
        "auto", "TensorFloat-32 in fp32 matmuls and convolutions on GPUs; auto: torch's (convolutions alone)"
    )
    recompute: Literal["none", "blocks", "selective"] = setting(
        "none", "activations computed again in backward to save memory: none, of whole blocks, or all but matmuls"
    )
    ema: float = setting(
        0.0, "decay of an exponential moving average of the weights, used in evaluation; 0: off", above=0, below=1
    )
    eval_every: int = setting(1, "epochs between evaluations; 0: only at the end", above=0)
    seed: int = setting(0, "seed of parameters, order and augmentation", above=0)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU per worker where there are enough")
    deterministic: bool = setting(False, "deterministic GPU kernels (slower)")


@dataclass(frozen=True, config=STRICT)
class StrategyConfig:
    """The four independent choices."""

    parallel: str = setting(
        "dp=-1",
        "where parameters and samples live: dp (replicas), fsdp (sharded), tp (tensor), pp (pipeline), such as "
        "dp=2,tp=2; -1: what is left; options zero1, sequence, schedule=1f1b, microbatches=N",
    )
    sync: str = setting("allreduce", "how and when replicas agree")
    compression: str = setting("none", "what travels instead of a tensor")
    collective: str = setting(
        "backend", "along which path it travels; backend: as NCCL or gloo chooses", renamed={"auto": "backend"}
    )
    tensor_plan: str = setting("", "tp: how layers are split, over the model's own hints: PATTERN=STYLE,PATTERN=STYLE")
    cuts: str = setting("", "pp: the blocks that stages begin with, such as blocks.4,blocks.8; empty: balanced")


@dataclass(frozen=True, config=STRICT)
class LaunchConfig:
    """Processes and machines."""

    on: str = code_setting("local", "where processes run: local, or module:Class of your own", "--on")
    workers: int = setting(0, "processes on this machine; 0: one per GPU, or min(2, cores) on a CPU", above=0)
    threads: int = setting(0, "compute threads per worker; 0: cores / workers", above=0)
    nodes: str = setting("1", "machines: a number, or a range such as 1:4 that may change while the run goes")
    rendezvous: str = setting(
        "",
        "HOST:PORT of the first machine, the same on all machines; they share the run's secret by a common disk, or by "
        "ECHELON_RUN_SECRET",
    )
    trusted_network: bool = setting(
        False, "machines meet without a secret: whoever reaches their ports can take part, but run no code"
    )
    link: str = setting("", "shape the links between this machine's workers: 100mbit, or 10mbit,20ms; needs root")
    max_restarts: int = setting(
        3, "restarts after a worker died with no new checkpoint in between, before the run is given up", above=0
    )
    timeout: str = setting("2m", "how long any rank waits for another before the run is restarted")
    machine_patience: str = setting("10m", "how long the machines of a run wait for one that was lost, before they end")
    log_dir: str = setting(
        "", "where logs and output of processes go, in a folder of the run's name; default: RUN/logs"
    )
    log_limit: str = setting("64mb", "bytes of each process's log, and of what it prints: of more, the newest stay")


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """When the run's state is written."""

    every: str = setting("1m", "between checkpoints: a number of steps (200), or a duration (5m)", "--checkpoint-every")
    keep: int = setting(2, "newest checkpoints kept, beside the best one", "--keep-checkpoints", above=1)
    io_patience: str = setting(
        "10m", "how long training goes on while the run's folder cannot be written, such as on a full disk"
    )


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """One run. Written to `config.yaml` in the run's folder; that file alone repeats the run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    task: str = code_setting("auto", "what is learnt: auto (by the data), a task's name, or module:Class", "--task")
    run: str = setting("", "the run's folder; default: runs/DATA-MODEL-NUMBER", "--run")
