"""Settings as types: what keywords `echelon.train` and `echelon.resume` take.

Generated from `echelon.config.schema` by `python -m echelon.config.keywords`: change that, and run this.
"""

# fmt: off
# ruff: noqa: E501

from collections.abc import Callable
from typing import Any, Literal, TypedDict


class ResumeSettings(TypedDict, total=False):
    """Keywords of `echelon.resume`: settings by the names of the command line's options, with underscores."""

    follow_links: bool
    """follow links that lead out of the data folder [default: False]"""
    loaders: int
    """loading processes per worker; 0: in the worker itself; -1: chosen from the data [default: -1]"""
    decode: Literal["cpu", "gpu"]
    """where image files are decoded and resized; gpu: pixels differ by rounding (pip install echelon[gpu-jpeg]) [default: 'cpu']"""
    on_nan: Literal["stop", "skip"]
    """when a sample or a loss is not finite (NaN): stop, or skip that sample or batch [default: 'stop']"""
    on_bad_image: Literal["stop", "skip"]
    """when an image cannot be decoded: stop, or skip and count it [default: 'stop']"""
    epochs: int
    """passes over the training data [default: 10]"""
    max_steps: int
    """stop after this many optimizer steps; 0: no limit [default: 0]"""
    accumulate: int | Literal["auto"]
    """micro-batches that a worker's part of a batch is cut into; auto, or 0: as few as are forecast to fit [default: 1]"""
    on_oom: Literal["fail", "halve"]
    """when a worker runs out of memory: fail (like any other error) or halve (continue from the newest checkpoint with twice as many micro-batches of half the size; the batch stays the same) [default: 'fail']"""
    recompute: Literal["none", "blocks", "selective"]
    """compute activations again in backward to save memory: none, blocks (all in blocks), selective (not matmuls) [default: 'none']"""
    eval_every: int
    """epochs between evaluations; 0: only at the end [default: 1]"""
    early_stop: int
    """stop after this many evaluations in a row without a better primary metric; 0: off [default: 0]"""
    early_stop_delta: float
    """a gain of the primary metric up to this does not count as better [default: 0.0]"""
    max_time: str
    """finish training, the last evaluation, the checkpoint and the report within this time, such as 2h; `echelon resume` continues, with as much time again; empty: no limit"""
    profile: int
    """steps of each rank to profile, after 5 others: a trace for Perfetto in the run's folder; 0: none [default: 0]"""
    parallel: str
    """where parameters and samples live: dp (replicas), fsdp (sharded), tp (tensor), pp (pipeline), such as dp=2,tp=2; -1: all remaining workers; options zero1, table=N, sequence, schedule=1f1b, microbatches=N; auto: the fastest that fits in memory [default: 'dp=-1']"""
    tensor_plan: str
    """tp: how layers are split, in place of Echelon's choice: PATTERN=STYLE,PATTERN=STYLE"""
    cuts: str
    """pp: the blocks at which stages after the first begin, such as blocks.4,blocks.8; empty: balanced"""
    on: str
    """where it runs: local, ssh(hosts=a+b), slurm(nodes=2), a name of your places.yaml, or module:Class of your own [default: 'local']"""
    workers: int
    """processes on this machine; 0: one per GPU, or min(2, cores) on a CPU [default: 0]"""
    threads: int
    """compute threads per worker; 0: cores / workers, or OMP_NUM_THREADS if that is less [default: 0]"""
    balance: Literal["auto", "off"]
    """divide a batch by the workers' measured speeds, so that they finish together: auto, or off (equal parts) [default: 'off']"""
    nodes: str | int
    """number of machines, or a range such as 1:4 within which machines may come and go [default: '1']"""
    rendezvous: str
    """HOST:PORT of the first machine, the same on all machines; they get the run's secret from a shared disk or from ECHELON_RUN_SECRET. With A:PORT,B:PORT,C:PORT the next one leads when the first is lost"""
    trusted_network: bool
    """let machines meet without a secret: whoever reaches their ports can take part, but cannot run code [default: False]"""
    link: str
    """slow down the links between this machine's workers: 100mbit, or 10mbit,20ms (rate, delay); needs root"""
    max_restarts: int
    """how many deaths a run survives without a new checkpoint in between [default: 3]"""
    elastic: Literal["auto", "on", "off"]
    """when a worker dies, in runs without a parameter server: on (the others go on, and train its share of each batch until it is back; where the model or its optimizer's state is divided, they save what was trained, and all start again from there), off (all start again from the newest checkpoint), or auto (on where that is possible and costs little while no worker dies) [default: 'auto']"""
    timeout: str
    """how long any rank waits for another before the run is restarted [default: '2m']"""
    machine_patience: str
    """how long the machines of a run wait for a lost one before they give up [default: '10m']"""
    log_dir: str
    """folder for logs and output of processes, below the run's name; empty: RUN/logs"""
    log_limit: str
    """limit for each process's log, and for what it prints; the oldest lines are dropped [default: '64mb']"""
    checkpoint_every: str | int
    """time or steps between checkpoints: 5m, or 200 [default: '1m']"""
    keep_checkpoints: int
    """how many of the newest checkpoints are kept, beside the best one [default: 2]"""
    io_patience: str
    """how long training goes on while the run's folder cannot be written, for example because the disk is full [default: '10m']"""
    mirror: str
    """folder or URL (s3://BUCKET/NAME, gs://, az://) for copies of each checkpoint, the record and the report, made while training goes on; echelon resume URL continues from there; empty: none"""
    checkpoint_codec: Literal["none", "zstd"]
    """compression of a run's files at a URL or --mirror: none, or zstd [default: 'none']"""
    logger: str
    """services that show the run's curves, joined by +: wandb(project=digits)+mlflow"""
    notify: str
    """what to call when the run ends or a process dies: a webhook's URL, in which $NAME comes from the environment, or a program, which reads JSON from its standard input"""


class TrainSettings(ResumeSettings, total=False):
    """Keywords of `echelon.train`: settings by the names of the command line's options, with underscores."""

    input: str
    """columns that the model gets, joined by commas; empty: all but the target"""
    target: str
    """column to predict, or several joined by commas"""
    columns: str
    """correct what Echelon takes columns of whole numbers for, number or category, such as visits=number,shop=category"""
    split: str
    """tables: the column that names the part of each row, train, val or test; none: no column does; empty: split, set, part, subset or fold if its values are such names"""
    time: str
    """recommendation without a target: the column with the time, to hold out the last items of each user; empty: timestamp, time or date if there is one, else the order of the rows"""
    negatives: int
    """recommendation without a target: how many items that a user did not take are drawn for each one taken [default: 64]"""
    tokeniser: str
    """tokeniser of texts: auto, bpe(8000), characters, or a folder with a tokenizer.json of transformers [default: 'auto']"""
    features: str
    """what a model is given of sounds: log_mel (64 bands), waveform, or a transformers folder that says it; auto: what a transformers model is given, else log_mel [default: 'auto']"""
    measures: str
    """folder of a run whose measures are kept: size and normalisation of inputs, categories and scales of columns, numbers of classes"""
    context: int
    """tokens in each window that a long text is cut into [default: 128]"""
    data_root: str
    """folder for downloaded torchvision data sets, data from URLs, trained tokenisers, and indexes of tar shards [default: 'data']"""
    data_cache_limit: str
    """limit for data from URLs below --data-root; beyond it, what was used least recently is removed [default: '50gb']"""
    batch_size: int | Literal["auto"]
    """samples per optimizer step over all workers (global batch); auto, or 0: as many as are forecast to fit in memory, with at least 50 steps in an epoch [default: 128]"""
    eval_batch_size: int
    """samples per evaluation step and worker; 0: as in training [default: 0]"""
    image_size: int
    """side of the square image in pixels; 0: from the data (ImageNet-sized: 224) [default: 0]"""
    normalise: str
    """mean and standard deviation of pixels, from 0 to 1: auto (those that published --weights were trained with; else measured, of images beyond 96 pixels ImageNet's), measured, imagenet, or numbers of all channels or of each, such as 0.5,0.5,0.5/0.25,0.25,0.25 [default: 'auto']"""
    augment: Literal["auto", "none", "flip_crop", "imagenet"]
    """augmentation: auto (by image size; none for digits, letters and road signs), none, flip_crop (pad and crop), imagenet (random resized crop) [default: 'auto']"""
    transform: str | Callable[[Any], Any]
    """module:function of yours, applied to each training input (images: uint8, after augmentation)"""
    eval_transform: str | Callable[[Any], Any]
    """module:function of yours, applied to each evaluation input"""
    mixup: float
    """mixup's alpha, such as 0.2: pairs of samples and their classes are blended; 0: off [default: 0.0]"""
    cutmix: float
    """CutMix's alpha, such as 1: a box of another image; with --mixup, a coin decides for each batch; 0: off [default: 0.0]"""
    sample_weights: str
    """draw the samples of an epoch with replacement, by weight: none, inverse-class, or a file with a weight for each training sample (.npy, or one number a line) [default: 'none']"""
    holdout: float
    """share held out for evaluation when the data has no val/ or test/ [default: 0.2]"""
    weights: str
    """weights to start from: a file or folder (safetensors, a torch state dict, other trainers' checkpoints), runs/NAME, hf:FOLDER_OR_NAME, or pretrained (the model's own of timm, torchvision or transformers)"""
    head: Literal["auto", "keep", "new"]
    """with --weights, the model's head: keep (it must fit), new (as initialised), or auto (new where the weights have none of its shape) [default: 'auto']"""
    tune: str
    """what is trained: all, head, last(3), bias, norm, lora(r=8), freeze(PATTERN), unfreeze(epoch=3), layer_decay(0.75), replace(PATTERN, module:function), joined by +; the rest is frozen, is not sent and has no optimizer state [default: 'all']"""
    frozen_norm: Literal["eval", "train"]
    """statistics of BatchNorm layers with frozen parameters: eval (unchanged), or train (updated) [default: 'eval']"""
    sparse_tables: bool
    """give embedding tables sparse gradients, so that only rows that a batch uses are updated and sent; with --optimizer sparse_adam, adagrad or sgd, --momentum 0 and --weight-decay 0 [default: False]"""
    sync_batchnorm: bool
    """BatchNorm statistics over the whole global batch [default: False]"""
    compile: bool
    """torch.compile the model [default: False]"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"]
    """of torch.compile: reduce-overhead replays CUDA graphs, for small models; max-autotune-... tries kernels [default: 'default']"""
    channels_last: Literal["auto", "on", "off"]
    """memory layout of images; auto: on for GPUs [default: 'auto']"""
    optimizer: str | Callable[..., Any]
    """timm optimizer: sgd (Nesterov), momentum, adamw, lars, lamb, ...; or module:Class(name=value) of your own [default: 'sgd']"""
    lr: float
    """learning rate; default with --weights: a tenth of it (lora: 0.3 of it; a new head alone: all of it) [default: 0.1]"""
    momentum: float
    """momentum (SGD family) [default: 0.9]"""
    weight_decay: float
    """weight decay; none on biases and normalisation [default: 0.0005]"""
    schedule: Literal["cosine", "step", "poly", "constant"]
    """learning-rate schedule [default: 'cosine']"""
    lr_find: bool
    """search for a learning rate instead of training: 100 steps at rates that rise from 1e-6 to 10, in a run folder of its own, with a curve and a suggestion [default: False]"""
    step_epochs: float
    """step schedule: epochs from one drop to a tenth to the next [default: 30.0]"""
    warmup_epochs: float
    """epochs of linear warm-up [default: 0.0]"""
    scale_lr: int
    """multiply lr by batch_size / this (linear scaling); 0: off [default: 0]"""
    clip_norm: float
    """clip the gradient's norm at this; 0: off [default: 0.0]"""
    label_smoothing: float
    """label smoothing [default: 0.0]"""
    class_weights: str
    """none, balanced, or a comma-separated list with one weight per class, scaled so that the mean weight of a training sample is 1; evaluations do not weigh [default: 'none']"""
    precision: Literal["fp32", "bf16", "bf16-params", "fp16", "fp8"]
    """fp32, bf16 (autocast), bf16-params (float32 masters), fp16 (autocast, scaled losses) or fp8 (torchao, a GPU) [default: 'fp32']"""
    tf32: Literal["auto", "on", "off"]
    """TensorFloat-32 in fp32 matmuls and convolutions on GPUs; auto: as torch does (in convolutions only) [default: 'auto']"""
    ema: float
    """decay of an exponential moving average of the weights, used in evaluation; 0: off [default: 0.0]"""
    primary_metric: str
    """the metric that chooses the best checkpoint: top1, loss, f1_score, mine(min); empty: the task's"""
    worst_samples: int
    """how many images with the highest evaluation loss the report shows; 0: none [default: 12]"""
    seed: int
    """seed of parameters, order and augmentation [default: 0]"""
    device: Literal["auto", "cpu", "cuda"]
    """auto: a GPU per worker where there are enough [default: 'auto']"""
    deterministic: bool
    """deterministic GPU kernels (slower) [default: False]"""
    sync: str
    """how and when replicas agree, such as local(period=16) or ps(mode=async) [default: 'allreduce']"""
    compression: str
    """what travels instead of a tensor, such as int8 or topk(0.01) [default: 'none']"""
    collective: str
    """along which path it travels; backend: as NCCL or gloo chooses; auto: the fastest, measured at the start; each takes order=priority: what the next forward pass needs first goes first [default: 'backend']"""
