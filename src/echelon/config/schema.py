"""What a run is, as frozen dataclasses. Each field's help text is also its command-line help.

A field's command-line flag is its name with dashes (`batch_size` is `--batch-size`), unless `flag` names another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")


@dataclasses.dataclass(frozen=True)
class SettingTraits:
    """What a setting is beside its name, type and default.

    Attributes:
        flag: of the command line; None: its name with dashes.
        above, below: inclusive bounds of a number.
        renamed: other words for a value, such as those that runs were written with before.
        code: whether its value may be `module:name`, code that a run imports, or names such code among `calls`.
        callables: the type of the code itself, which may be given from Python too; empty: none may.
    """

    help: str
    flag: str | None = None
    above: float | None = None
    below: float | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    code: Literal["", "value", "calls"] = ""
    callables: str = ""


def traits_of(item: dataclasses.Field[Any]) -> SettingTraits:
    """Return what a field of the schema was declared with."""
    traits: SettingTraits = item.metadata["traits"]
    return traits


def setting(
    default: Any,
    help: str,
    flag: str | None = None,
    above: float | None = None,
    below: float | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """Declare one field; see `SettingTraits`."""
    return field(default=default, metadata={"traits": SettingTraits(help, flag, above, below, renamed or {})})


def code_setting(default: str, help: str, flag: str, callables: str = "") -> Any:
    """Declare a field whose value may be `module:name`: code that a run imports; see `SettingTraits`."""
    return field(default=default, metadata={"traits": SettingTraits(help, flag, code="value", callables=callables)})


def calls_setting(help: str, flag: str, default: str = "", callables: str = "") -> Any:
    """Declare a field of names joined by `+`, with arguments, some of which may be `module:name`."""
    return field(default=default, metadata={"traits": SettingTraits(help, flag, code="calls", callables=callables)})


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where samples come from and how they are batched."""

    source: str = code_setting(
        "digits",
        "a folder of images, sounds, texts or tar shards, a table (.csv, .jsonl, .parquet), a text (.txt), a URL of "
        "shards or a table, a name such as digits, cifar10 or hf:NAME, or module:function; echelon list sources shows "
        "all",
        "DATA",
    )
    input: str = setting("", "columns that the model is given, joined by commas; empty: all but the target")
    target: str = setting("", "column that is to be predicted, or several joined by commas")
    columns: str = setting(
        "",
        "what columns of whole numbers are, where the choice made is wrong: number or category, such as "
        "visits=number,shop=category",
    )
    time: str = setting(
        "",
        "recommendation without a target: the column that says when, by which the last of each user are held out; "
        "empty: timestamp, time or date where there is one, else the order of the rows",
    )
    negatives: int = setting(
        64, "recommendation without a target: items that a user did not take, drawn beside each one taken", above=1
    )
    tokeniser: str = setting(
        "auto", "tokeniser of texts: auto, bpe(8000), characters, or a folder with a tokenizer.json of transformers"
    )
    context: int = setting(128, "tokens in each window that a long text is cut into", above=1)
    root: str = setting(
        "data",
        "folder for downloaded torchvision data sets, data from URLs, tokenisers that were trained, and indexes of tar "
        "shards",
        "--data-root",
    )
    cache_limit: str = setting(
        "50gb",
        "size of all data from URLs that is kept below --data-root: of more, the least recently used goes",
        "--data-cache-limit",
    )
    batch_size: int = setting(
        128,
        "samples per optimizer step over all workers (global batch); auto, or 0: the most that fit the memory that is "
        "there, with 50 steps or more an epoch",
        above=0,
        renamed={"auto": "0"},
    )
    eval_batch_size: int = setting(0, "samples per evaluation step and worker; 0: as in training", above=0)
    image_size: int = setting(0, "side of the square image in pixels; 0: from the data (ImageNet-sized: 224)", above=0)
    follow_links: bool = setting(False, "follow links that lead out of the data folder")
    augment: Literal["auto", "none", "flip_crop", "imagenet"] = setting(
        "auto", "augmentation: auto (by image size), none, flip_crop (pad and crop), imagenet (random resized crop)"
    )
    transform: str = code_setting(
        "",
        "module:function of your own on each training input (images: uint8, augmented)",
        "--transform",
        "Callable[[Any], Any]",
    )
    eval_transform: str = code_setting(
        "", "module:function likewise, on each evaluation input", "--eval-transform", "Callable[[Any], Any]"
    )
    mixup: float = setting(
        0.0, "mixup's alpha, such as 0.2: pairs of samples and their classes are blended; 0: off", above=0
    )
    cutmix: float = setting(
        0.0,
        "CutMix's alpha, such as 1: a box of another image; with --mixup, a coin decides for each batch; 0: off",
        above=0,
    )
    sample_weights: str = setting(
        "none",
        "an epoch is N draws with replacement by weight: none, inverse-class, or a file with a weight for each "
        "training sample (.npy, or a number a line)",
    )
    holdout: float = setting(
        0.2, "share held out for evaluation when the data has no val/ or test/", above=0.01, below=0.9
    )
    loaders: int = setting(
        -1, "loading processes per worker; 0: in the worker itself; -1: chosen from the data", above=-1
    )
    on_nan: Literal["stop", "skip"] = setting(
        "stop",
        "when a sample or a loss is not finite (NaN): stop, or skip that sample or batch",
    )
    on_bad_image: Literal["stop", "skip"] = setting(
        "stop", "an image that cannot be decoded: stop, or skip and count it"
    )


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The network."""

    name: str = code_setting(
        "auto",
        "auto, a built-in (mlp, small_cnn, resnet20), timm/NAME, torchvision/NAME, transformers/FOLDER "
        "or module:function",
        "--model",
    )
    weights: str = setting(
        "",
        "weights to start from: a file or folder (safetensors, a torch state dict, other trainers' checkpoints), "
        "runs/NAME, hf:FOLDER_OR_NAME, or pretrained (the model's own of timm, torchvision or transformers)",
    )
    head: Literal["auto", "keep", "new"] = setting(
        "auto",
        "with --weights, the model's head: keep (it must fit), new (as initialised), or auto (new where the weights "
        "have none of its shape)",
    )
    tune: str = calls_setting(
        "what is trained: all, head, last(3), bias, norm, lora(r=8), freeze(PATTERN), unfreeze(epoch=3), "
        "layer_decay(0.75), replace(PATTERN, module:function), joined by +; what is frozen sends no byte and has no "
        "optimizer state",
        "--tune",
        "all",
    )
    frozen_norm: Literal["eval", "train"] = setting(
        "eval", "statistics of BatchNorm whose parameters are frozen: eval (they stay), or train"
    )
    sparse_tables: bool = setting(
        False,
        "embedding tables have sparse gradients: rows that a batch touches are updated and travel, no others; with "
        "--optimizer sparse_adam, adagrad or sgd, --momentum 0 and --weight-decay 0",
    )
    sync_batchnorm: bool = setting(False, "BatchNorm statistics over the whole global batch")
    compile: bool = setting(False, "torch.compile the model")
    channels_last: Literal["auto", "on", "off"] = setting("auto", "memory layout of images; auto: on for GPUs")


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Optimizer, schedule and loss; names are timm's."""

    name: str = calls_setting(
        "timm optimizer: sgd (Nesterov), momentum, adamw, lars, lamb, ...; or module:Class(name=value) of your own",
        "--optimizer",
        "sgd",
        "Callable[..., Any]",
    )
    lr: float = setting(
        0.1, "learning rate; left out with --weights: a tenth of it (lora: 0.3, a new head alone: all)", above=0
    )
    momentum: float = setting(0.9, "momentum (SGD family)", above=0, below=1)
    weight_decay: float = setting(5e-4, "weight decay; none on biases and normalisation", above=0)
    schedule: Literal["cosine", "step", "poly", "constant"] = setting("cosine", "learning-rate schedule")
    lr_find: bool = setting(
        False,
        "search the learning rate and train nothing: 100 steps at rates that rise from 1e-6 to 10, in a run folder of "
        "their own, with a curve and a suggestion",
    )
    step_epochs: float = setting(30.0, "epochs between drops by 10 of the step schedule", above=0)
    warmup_epochs: float = setting(0.0, "epochs of linear warm-up", above=0)
    scale_lr: int = setting(0, "multiply lr by batch_size / this (linear scaling); 0: off", above=0)
    clip_norm: float = setting(0.0, "clip the gradient's norm at this; 0: off", above=0)
    label_smoothing: float = setting(0.0, "label smoothing", above=0, below=1)
    loss: str = calls_setting(
        "a loss of your own, (outputs, targets) -> one number a sample, their sum or mean: module:name, or a class of "
        "torch.nn such as SmoothL1Loss(beta=0.5)",
        "--loss",
    )
    class_weights: str = setting("none", "none, balanced, or a comma-separated list with one weight per class")


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How long, how precisely, from which seed."""

    epochs: int = setting(10, "passes over the training data", above=1)
    max_steps: int = setting(0, "stop after this many optimizer steps; 0: no limit", above=0)
    accumulate: int = setting(
        1,
        "micro-batches that a worker's part of a batch is cut into; auto, or 0: as few as fit the memory that is there",
        above=0,
        renamed={"auto": "0"},
    )
    on_oom: Literal["fail", "halve"] = setting(
        "fail",
        "what follows when a worker runs out of memory: fail (an error as any other) or halve (go on from the newest "
        "checkpoint with twice as many micro-batches; the batch stays as it is)",
    )
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
    metrics: str = calls_setting(
        "metrics of torchmetrics beside the task's, joined by +: F1Score(average=macro)+module:Class", "--metrics"
    )
    primary_metric: str = setting(
        "", "the metric by which checkpoints are compared: top1, loss, f1_score, mine(min); empty: the task's"
    )
    eval_every: int = setting(1, "epochs between evaluations; 0: only at the end", above=0)
    worst_samples: int = setting(
        12, "images of the highest evaluation loss that the report shows; 0: none", above=0, below=48
    )
    early_stop: int = setting(
        0, "stop after so many evaluations in a row without improvement of the task's primary metric; 0: off", above=0
    )
    early_stop_delta: float = setting(0.0, "a change of the primary metric up to this is no improvement", above=0)
    max_time: str = setting(
        "",
        "end with an evaluation, a checkpoint and the report within this time of the command, such as 2h; `echelon "
        "resume` goes on, with as much again; empty: no limit",
    )
    seed: int = setting(0, "seed of parameters, order and augmentation", above=0)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU per worker where there are enough")
    profile: int = setting(
        0, "steps of each rank to profile, after 5 others: a trace for Perfetto in the run's folder; 0: none", above=0
    )
    deterministic: bool = setting(False, "deterministic GPU kernels (slower)")


@dataclass(frozen=True, config=STRICT)
class StrategyConfig:
    """The four independent choices."""

    parallel: str = setting(
        "dp=-1",
        "where parameters and samples live: dp (replicas), fsdp (sharded), tp (tensor), pp (pipeline), such as "
        "dp=2,tp=2; -1: what is left; options zero1, sequence, schedule=1f1b, microbatches=N; auto: the fastest that "
        "fits memory",
    )
    sync: str = setting("allreduce", "how and when replicas agree, such as local(period=16) or ps(mode=async)")
    compression: str = setting("none", "what travels instead of a tensor, such as int8 or topk(0.01)")
    collective: str = setting(
        "backend", "along which path it travels; backend: as NCCL or gloo chooses; auto: tried at the start"
    )
    tensor_plan: str = setting("", "tp: how layers are split, over the model's own hints: PATTERN=STYLE,PATTERN=STYLE")
    cuts: str = setting("", "pp: the blocks that stages begin with, such as blocks.4,blocks.8; empty: balanced")


@dataclass(frozen=True, config=STRICT)
class LaunchConfig:
    """Processes and machines."""

    on: str = code_setting(
        "local",
        "where it runs: local, ssh(hosts=a+b), slurm(nodes=2), a name of your places.yaml, or module:Class of your own",
        "--on",
    )
    workers: int = setting(0, "processes on this machine; 0: one per GPU, or min(2, cores) on a CPU", above=0)
    threads: int = setting(
        0, "compute threads per worker; 0: cores / workers, or OMP_NUM_THREADS if that is less", above=0
    )
    balance: Literal["auto", "off"] = setting(
        "off",
        "parts of a batch by the workers' measured speed, so that all are done together: auto, or off (equal parts)",
    )
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
    elastic: Literal["auto", "on", "off"] = setting(
        "auto",
        "what follows when a worker of an all-reduce or averaging run is killed: on (the others go on, and train its "
        "share of each batch until it is back), off (all start again from the newest checkpoint), or auto (on where "
        "that is possible and costs little without a death)",
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
    mirror: str = setting(
        "",
        "a folder or URL (s3://BUCKET/NAME, gs://, az://) that each checkpoint, the record and the report are copied "
        "to while training goes on; echelon resume URL continues from there; empty: none",
    )
    codec: Literal["none", "zstd"] = setting(
        "none", "how files of a run are stored at a URL or --mirror: none, or zstd", "--checkpoint-codec"
    )


@dataclass(frozen=True, config=STRICT)
class TrackingConfig:
    """Who is told what happens in a run, beside its record and TensorBoard."""

    loggers: str = setting("", "services that draw the run, joined by +: wandb(project=digits)+mlflow", "--logger")
    callbacks: str = calls_setting(
        "classes of your own that are told what happens in the run: module:Class, module:Class(every=10)+module:Other",
        "--callbacks",
    )
    notify: str = setting(
        "",
        "who is told how the run ends, and that a process died: a webhook's URL, in which $NAME is taken from the "
        "environment, or a program, which reads JSON from its standard input",
        "--notify",
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
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    task: str = code_setting(
        "auto", "what is learnt: auto (by the data), a name of `echelon list tasks`, or module:Class", "--task"
    )
    run: str = setting("", "the run's folder; left out: runs/DATA-MODEL-NUMBER", "--run")
