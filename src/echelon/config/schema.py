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

from echelon.core.units import bytes_for

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
        counts: its text may be a whole number, which may be given from Python as one.
    """

    help: str
    flag: str | None = None
    above: float | None = None
    below: float | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    code: Literal["", "value", "calls"] = ""
    callables: str = ""
    counts: bool = False


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


def count_setting(default: str, help: str, flag: str | None = None) -> Any:
    """Declare a field of a text that may be a number, such as `2` beside `1:4`; see `SettingTraits`."""
    return field(default=default, metadata={"traits": SettingTraits(help, flag, counts=True)})


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
    input: str = setting("", "columns that the model gets, joined by commas; empty: all but the target")
    target: str = setting("", "column to predict, or several joined by commas")
    columns: str = setting(
        "",
        "correct what Echelon takes columns of whole numbers for, number or category, such as "
        "visits=number,shop=category",
    )
    split: str = setting(
        "",
        "tables: the column that names the part of each row, train, val or test; none: no column does; empty: split, "
        "set, part, subset or fold if its values are such names",
    )
    time: str = setting(
        "",
        "recommendation without a target: the column with the time, to hold out the last items of each user; empty: "
        "timestamp, time or date if there is one, else the order of the rows",
    )
    negatives: int = setting(
        64,
        "recommendation without a target: how many items that a user did not take are drawn for each one taken",
        above=1,
    )
    tokeniser: str = setting(
        "auto", "tokeniser of texts: auto, bpe(8000), characters, or a folder with a tokenizer.json of transformers"
    )
    features: str = setting(
        "auto",
        "what a model is given of sounds: log_mel (64 bands), waveform, or a transformers folder that says it; auto: "
        "what a transformers model is given, else log_mel",
    )
    measures: str = setting(
        "",
        "folder of a run whose measures are kept: size and normalisation of inputs, categories and scales of "
        "columns, numbers of classes",
    )
    context: int = setting(128, "tokens in each window that a long text is cut into", above=1)
    root: str = setting(
        "data",
        "folder for downloaded torchvision data sets, data from URLs, trained tokenisers, and indexes of tar shards",
        "--data-root",
    )
    cache_limit: str = setting(
        "50gb",
        "limit for data from URLs below --data-root; beyond it, what was used least recently is removed",
        "--data-cache-limit",
    )
    batch_size: int = setting(
        128,
        "samples per optimizer step over all workers (global batch); auto, or 0: as many as are forecast to fit in "
        "memory, with at least 50 steps in an epoch",
        above=0,
        renamed={"auto": "0"},
    )
    eval_batch_size: int = setting(0, "samples per evaluation step and worker; 0: as in training", above=0)
    image_size: int = setting(0, "side of the square image in pixels; 0: from the data (ImageNet-sized: 224)", above=0)
    normalise: str = setting(
        "auto",
        "mean and standard deviation of pixels, from 0 to 1: auto (those that published --weights were trained with; "
        "else measured, of images beyond 96 pixels ImageNet's), measured, imagenet, or numbers of all channels or of "
        "each, such as 0.5,0.5,0.5/0.25,0.25,0.25",
    )
    follow_links: bool = setting(False, "follow links that lead out of the data folder")
    augment: Literal["auto", "none", "flip_crop", "imagenet"] = setting(
        "auto",
        "augmentation: auto (by image size; none for digits, letters and road signs), none, flip_crop (pad and crop), "
        "imagenet (random resized crop)",
    )
    transform: str = code_setting(
        "",
        "module:function of yours, applied to each training input (images: uint8, after augmentation)",
        "--transform",
        "Callable[[Any], Any]",
    )
    eval_transform: str = code_setting(
        "", "module:function of yours, applied to each evaluation input", "--eval-transform", "Callable[[Any], Any]"
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
        "draw the samples of an epoch with replacement, by weight: none, inverse-class, or a file with a weight for "
        "each training sample (.npy, or one number a line)",
    )
    holdout: float = setting(
        0.2, "share held out for evaluation when the data has no val/ or test/", above=0.01, below=0.9
    )
    loaders: int = setting(
        -1, "loading processes per worker; 0: in the worker itself; -1: chosen from the data", above=-1
    )
    decode: Literal["cpu", "gpu"] = setting(
        "cpu",
        "where image files are decoded and resized; gpu: pixels differ by rounding (pip install echelon[gpu-jpeg])",
    )
    on_nan: Literal["stop", "skip"] = setting(
        "stop",
        "when a sample or a loss is not finite (NaN): stop, or skip that sample or batch",
    )
    on_bad_image: Literal["stop", "skip"] = setting(
        "stop", "when an image cannot be decoded: stop, or skip and count it"
    )

    @property
    def cache_limit_bytes(self) -> float:
        """The limit for data from URLs.

        Raises:
            UserError: it is no size.
        """
        return bytes_for("--data-cache-limit")(self.cache_limit)


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
        "layer_decay(0.75), replace(PATTERN, module:function), joined by +; the rest is frozen, is not sent and has no "
        "optimizer state",
        "--tune",
        "all",
    )
    frozen_norm: Literal["eval", "train"] = setting(
        "eval", "statistics of BatchNorm layers with frozen parameters: eval (unchanged), or train (updated)"
    )
    sparse_tables: bool = setting(
        False,
        "give embedding tables sparse gradients, so that only rows that a batch uses are updated and sent; with "
        "--optimizer sparse_adam, adagrad or sgd, --momentum 0 and --weight-decay 0",
    )
    sync_batchnorm: bool = setting(False, "BatchNorm statistics over the whole global batch")
    compile: bool = setting(False, "torch.compile the model")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] = setting(
        "default",
        "of torch.compile: reduce-overhead replays CUDA graphs, for small models; max-autotune-... tries kernels",
    )
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
        0.1,
        "learning rate; default with --weights: a tenth of it (lora: 0.3 of it; a new head alone: all of it)",
        above=0,
    )
    momentum: float = setting(0.9, "momentum (SGD family)", above=0, below=1)
    weight_decay: float = setting(5e-4, "weight decay; none on biases and normalisation", above=0)
    schedule: Literal["cosine", "step", "poly", "constant"] = setting("cosine", "learning-rate schedule")
    lr_find: bool = setting(
        False,
        "search for a learning rate instead of training: 100 steps at rates that rise from 1e-6 to 10, in a run folder "
        "of its own, with a curve and a suggestion",
    )
    step_epochs: float = setting(30.0, "step schedule: epochs from one drop to a tenth to the next", above=0)
    warmup_epochs: float = setting(0.0, "epochs of linear warm-up", above=0)
    scale_lr: int = setting(0, "multiply lr by batch_size / this (linear scaling); 0: off", above=0)
    clip_norm: float = setting(0.0, "clip the gradient's norm at this; 0: off", above=0)
    label_smoothing: float = setting(0.0, "label smoothing", above=0, below=1)
    loss: str = calls_setting(
        "your own loss, (outputs, targets) -> one number per sample, their sum or mean: module:name, or a class of "
        "torch.nn such as SmoothL1Loss(beta=0.5)",
        "--loss",
    )
    class_weights: str = setting(
        "none",
        "none, balanced, or a comma-separated list with one weight per class, scaled so that the mean weight of a "
        "training sample is 1; evaluations do not weigh",
    )


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How long, how precisely, from which seed."""

    epochs: int = setting(10, "passes over the training data", above=1)
    max_steps: int = setting(0, "stop after this many optimizer steps; 0: no limit", above=0)
    accumulate: int = setting(
        1,
        "micro-batches that a worker's part of a batch is cut into; auto, or 0: as few as are forecast to fit",
        above=0,
        renamed={"auto": "0"},
    )
    on_oom: Literal["fail", "halve"] = setting(
        "fail",
        "when a worker runs out of memory: fail (like any other error) or halve (continue from the newest checkpoint "
        "with twice as many micro-batches of half the size; the batch stays the same)",
    )
    precision: Literal["fp32", "bf16", "bf16-params", "fp16", "fp8"] = setting(
        "fp32",
        "fp32, bf16 (autocast), bf16-params (float32 masters), fp16 (autocast, scaled losses) or fp8 (torchao, a GPU)",
    )
    tf32: Literal["auto", "on", "off"] = setting(
        "auto", "TensorFloat-32 in fp32 matmuls and convolutions on GPUs; auto: as torch does (in convolutions only)"
    )
    recompute: Literal["none", "blocks", "selective"] = setting(
        "none",
        "compute activations again in backward to save memory: none, blocks (all in blocks), selective (not matmuls)",
    )
    ema: float = setting(
        0.0, "decay of an exponential moving average of the weights, used in evaluation; 0: off", above=0, below=1
    )
    metrics: str = calls_setting(
        "metrics of torchmetrics, or your own, beside the task's, joined by +: F1Score(average=macro)+module:Class",
        "--metrics",
    )
    primary_metric: str = setting(
        "", "the metric that chooses the best checkpoint: top1, loss, f1_score, mine(min); empty: the task's"
    )
    eval_every: int = setting(1, "epochs between evaluations; 0: only at the end", above=0)
    worst_samples: int = setting(
        12, "how many images with the highest evaluation loss the report shows; 0: none", above=0, below=48
    )
    early_stop: int = setting(
        0, "stop after this many evaluations in a row without a better primary metric; 0: off", above=0
    )
    early_stop_delta: float = setting(0.0, "a gain of the primary metric up to this does not count as better", above=0)
    max_time: str = setting(
        "",
        "finish training, the last evaluation, the checkpoint and the report within this time, such as 2h; `echelon "
        "resume` continues, with as much time again; empty: no limit",
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
        "dp=2,tp=2; -1: all remaining workers; options zero1, table=N, sequence, schedule=1f1b, microbatches=N; "
        "auto: the fastest that fits in memory",
    )
    sync: str = setting("allreduce", "how and when replicas agree, such as local(period=16) or ps(mode=async)")
    compression: str = setting("none", "what travels instead of a tensor, such as int8 or topk(0.01)")
    collective: str = setting(
        "backend",
        "along which path it travels; backend: as NCCL or gloo chooses; auto: the fastest, measured at the start; each "
        "takes order=priority: what the next forward pass needs first goes first",
    )
    tensor_plan: str = setting(
        "", "tp: how layers are split, in place of Echelon's choice: PATTERN=STYLE,PATTERN=STYLE"
    )
    cuts: str = setting(
        "", "pp: the blocks at which stages after the first begin, such as blocks.4,blocks.8; empty: balanced"
    )


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
        "divide a batch by the workers' measured speeds, so that they finish together: auto, or off (equal parts)",
    )
    nodes: str = count_setting("1", "number of machines, or a range such as 1:4 within which machines may come and go")
    rendezvous: str = setting(
        "",
        "HOST:PORT of the first machine, the same on all machines; they get the run's secret from a shared disk or "
        "from ECHELON_RUN_SECRET. With A:PORT,B:PORT,C:PORT the next one leads when the first is lost",
    )
    trusted_network: bool = setting(
        False, "let machines meet without a secret: whoever reaches their ports can take part, but cannot run code"
    )
    link: str = setting(
        "", "slow down the links between this machine's workers: 100mbit, or 10mbit,20ms (rate, delay); needs root"
    )
    max_restarts: int = setting(3, "how many deaths a run survives without a new checkpoint in between", above=0)
    elastic: Literal["auto", "on", "off"] = setting(
        "auto",
        "when a worker dies, in runs without a parameter server: on (the others go on, and train its share of each "
        "batch until it is back; where the model or its optimizer's state is divided, they save what was trained, and "
        "all start again from there), off (all start again from the newest checkpoint), or auto (on where that is "
        "possible and costs little while no worker dies)",
    )
    timeout: str = setting("2m", "how long any rank waits for another before the run is restarted")
    machine_patience: str = setting("10m", "how long the machines of a run wait for a lost one before they give up")
    log_dir: str = setting("", "folder for logs and output of processes, below the run's name; empty: RUN/logs")
    log_limit: str = setting(
        "64mb", "limit for each process's log, and for what it prints; the oldest lines are dropped"
    )


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """When the run's state is written."""

    every: str = count_setting("1m", "time or steps between checkpoints: 5m, or 200", "--checkpoint-every")
    keep: int = setting(
        2, "how many of the newest checkpoints are kept, beside the best one", "--keep-checkpoints", above=1
    )
    io_patience: str = setting(
        "10m",
        "how long training goes on while the run's folder cannot be written, for example because the disk is full",
    )
    mirror: str = setting(
        "",
        "folder or URL (s3://BUCKET/NAME, gs://, az://) for copies of each checkpoint, the record and the report, made "
        "while training goes on; echelon resume URL continues from there; empty: none",
    )
    codec: Literal["none", "zstd"] = setting(
        "none", "compression of a run's files at a URL or --mirror: none, or zstd", "--checkpoint-codec"
    )


@dataclass(frozen=True, config=STRICT)
class TrackingConfig:
    """Who is told what happens in a run, beside its record and TensorBoard."""

    loggers: str = setting(
        "", "services that show the run's curves, joined by +: wandb(project=digits)+mlflow", "--logger"
    )
    callbacks: str = calls_setting(
        "your own classes, whose methods are called while the run goes on: module:Class, "
        "module:Class(every=10)+module:Other",
        "--callbacks",
    )
    notify: str = setting(
        "",
        "what to call when the run ends or a process dies: a webhook's URL, in which $NAME comes from the environment, "
        "or a program, which reads JSON from its standard input",
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
        "auto", "what to learn: auto (from the data), a name of `echelon list tasks`, or module:Class", "--task"
    )
    run: str = setting("", "the run's folder; left out: runs/DATA-MODEL-NUMBER", "--run")
