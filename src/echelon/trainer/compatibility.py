"""The four choices together: what works, what is refused, and what one choice asks of another."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from echelon.collectives.reducer import check_combination
from echelon.collectives.wire import nothing_to_encode
from echelon.config import OptimizerConfig
from echelon.core.axes import Axis
from echelon.core.errors import UserError, naming
from echelon.core.layout import AUTO, FILL, Layout
from echelon.core.own import TRANSFORMERS
from echelon.models.external import WITHOUT_AUXILIARY_HEADS
from echelon.models.keras_model import KerasModule
from echelon.optim.some_parameters import BY_PARAMETER
from echelon.optim.traits import Reach, is_sgd, moves_by_rate
from echelon.sync.ps import server_settings
from echelon.torch_compat import BatchNormBase, DropoutNd
from echelon.trainer.layouts import check_layout
from echelon.trainer.precision import PRECISIONS
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.tables import check_sparse_setting
from echelon.trainer.unused import unused_notes

_LARGE_RATE = 0.02


def check_strategies(run: ResolvedRun, ranks: int) -> None:
    """Refuse combinations that cannot work.

    Args:
        ranks: of all machines.

    Raises:
        UserError: names the specs, the reason, and the nearest that works.
    """
    given, codec, path = run.described.strategy, run.compression.codec, run.path
    if run.sync.uses_servers:
        _check_servers(run, ranks)
    _check_epochs_of_tuning(run)
    check_sparse_setting(run, ranks)
    check_layout(run, ranks)
    with naming("--sync"):
        run.sync.check(run.compression)
    _check_replicas(run, ranks)
    _check_elastic(run, ranks)
    _check_optimizer(run, ranks)
    run.sync.check_momentum(run.compression, _has_momentum(run, run.described.optimizer))
    if run.compression.encodes and ranks > 1:
        with naming(f"--nodes {run.described.launch.nodes}") if run.nodes.is_range else nullcontext():
            check_combination(run.compression.build(), path, _fewest_replicas(run, ranks))
    sends_gradients = run.sync.encodes_gradients or run.sync.synchronous_steps
    if codec.in_gradient_units and sends_gradients and ranks > 1 and run.config.training.precision == "fp16":
        raise UserError(
            f"--compression {given.compression} has a setting in units of the gradient, and --precision fp16 scales "
            "losses: use --precision bf16"
        )
    if codec.direction and run.config.optimizer.clip_norm:
        raise UserError(
            f"--compression {given.compression} gives directions, whose norm says nothing: leave out --clip-norm"
        )
    if path.by_priority:
        _check_priority(run, ranks)
    if not path.by_backend and ranks == 1:
        raise UserError(f"--collective {given.collective} needs several workers: leave it out, or use --workers 2")


def _check_priority(run: ResolvedRun, ranks: int) -> None:
    """Refuse what an update by layers, behind the next forward pass, does not go together with.

    Raises:
        UserError: names it, the reason, and what works.
    """
    given, config, layout = run.described.strategy, run.config, run.layout_for(ranks)
    spec, optimizer = f"--collective {given.collective}", run.config.optimizer
    on_gpu = config.training.device != "cpu" and torch.cuda.device_count() > 0
    layers = "each layer is updated when its own sum has come"
    against = (
        (ranks == 1, "needs several workers", "use --workers 2, or leave it out"),
        (not run.sync.sums_in_backward, f"orders the sums of each step's gradients, and --sync {given.sync} has none",
         "use --sync allreduce"),
        (layout.splits or layout.zero1 or layout.table > 1, f"with --parallel {given.parallel}: parts of a model are "
         "not updated layer by layer yet", "use --parallel dp=N"),
        (run.compression.encodes, f"with --compression {given.compression}: codecs work on gradients together, not "
         "piece by piece", "leave one of them out"),
        (optimizer.clip_norm > 0, "with --clip-norm: the norm of all gradients is known with the last sum, and "
         f"{layers}", "leave one of them out"),
        (run.optimizer.user_traits is not None or optimizer.name.lower() not in BY_PARAMETER,
         f"with --optimizer {run.optimizer.name}: {layers}, in several steps, which it may count",
         f"use {', '.join(BY_PARAMETER[:-1])} or {BY_PARAMETER[-1]}"),
        (config.training.precision == "fp16", "with --precision fp16: whether a step overflows is known with the last "
         f"sum, and {layers}", "use --precision bf16 or fp32"),
        (config.training.ema > 0, "with --ema: the average is taken of all layers when a step ends, and the update "
         "ends in the next one", "leave one of them out"),
        (config.model.compile, "with --compile: compiled code reads all layers at once", "leave one of them out"),
        (on_gpu, f"with --device {config.training.device}: NCCL's sums are queued in one order on the device",
         "leave it out, or use --device cpu"),
    )  # fmt: skip
    for stands, reason, instead in against:
        if stands:
            raise UserError(f"{spec} {reason}: {instead}")


def summing_order(run: ResolvedRun, ranks: int) -> str:
    """Return in which order a run's gradients are summed; empty where it could not be by priority."""
    try:
        _check_priority(run, ranks)
    except UserError:
        return ""
    return run.path.order


def pushing_order(run: ResolvedRun, size: int) -> str:
    """Return in which order gradients travel to servers and values back; empty where it could not be by priority.

    Args:
        size: ranks of a worker.
    """
    settings = server_settings(run.sync)
    return "" if settings.backup or _against_order(run, size) else settings.order


def _fewest_replicas(run: ResolvedRun, ranks: int) -> int:
    """Return the least number of replicas, above one, between which a codec may work: that of the fewest machines."""
    if run.layout.sizes.get(Axis.DP, FILL) != FILL:
        return run.layout.dp
    return max(2, ranks * run.nodes.least // run.nodes.most // run.layout.fixed)


def _check_epochs_of_tuning(run: ResolvedRun) -> None:
    """Refuse an epoch of `--tune unfreeze` that a run never reaches (UserError)."""
    last, epochs = run.tuning.last.epoch, run.config.training.epochs
    if last >= epochs:
        raise UserError(
            f"--tune {run.tuning.text}: epoch {last + 1} is never reached, the run has {epochs}: more --epochs, or an "
            "earlier epoch"
        )


def survivors_go_on(run: ResolvedRun, ranks: int) -> bool:
    """Whether the others go on when one of a run's ranks dies: as asked for, or where it can be.

    What a start with less memory needs is known to the ranks of that start alone.
    """
    launch = run.config.launch
    if launch.elastic != "auto" or ranks == 1:
        return launch.elastic == "on" and ranks > 1 and not survivors_save(run, ranks)
    return not (run.config.training.on_oom != "fail" or _against_elastic(run, ranks))


def survivors_save(run: ResolvedRun, ranks: int) -> bool:
    """Whether the others save what was trained when one of a run's ranks dies, so that no step is lost."""
    config = run.config
    if config.launch.elastic == "off" or ranks == 1 or config.training.on_oom != "fail":
        return False
    return not _against_rescue(run, ranks)


def _has_second(layout: Layout) -> bool:
    """Whether what a rank has of a split model or optimizer is in another replica, or can be kept by a neighbour."""
    if layout.table > 1:
        return False
    return layout.zero1 or (layout.splits and (layout.dp > 1 or layout.fsdp > 1))


def keeps_copies(layout: Layout) -> bool:
    """Whether no other replica has what a rank has, so that a neighbour keeps a copy of it."""
    return layout.zero1 or layout.dp == 1


def _against_rescue(run: ResolvedRun, ranks: int) -> str:
    """Return the first setting with which survivors cannot save what a dead one had; empty: they can."""
    given, config, layout = run.described.strategy, run.config, run.layout_for(ranks)
    against = (
        (not _has_second(layout), f"--parallel {given.parallel}"),
        (keeps_copies(layout) and run.optimizer.reach > Reach.ELEMENT, f"--optimizer {run.optimizer.name}"),
        (not run.sync.sums_in_backward, f"--sync {given.sync}"),
        (config.training.precision == "fp16", "--precision fp16"),
        (not run.tuning.changes_nothing, f"--tune {run.tuning.text}"),
        (config.training.device != "cpu" and torch.cuda.device_count() > 0, f"--device {config.training.device}"),
    )
    return next((flag for stands, flag in against if stands), "")


def _check_elastic(run: ResolvedRun, ranks: int) -> None:
    """Refuse survivors that go on, where they cannot.

    Raises:
        UserError: names what stands against it.
    """
    if run.config.launch.elastic != "on" or ranks == 1 or survivors_save(run, ranks):
        return
    layout = run.layout_for(ranks)
    divides = (layout.splits or layout.zero1) and _has_second(layout)
    if flag := (_against_rescue if divides else _against_elastic)(run, ranks):
        raise UserError(f"--elastic on does not go together with {flag} yet: leave one of them out")


def _against_elastic(run: ResolvedRun, ranks: int) -> str:
    """Return the first setting with which survivors cannot go on; empty: they can."""
    given, config, layout = run.described.strategy, run.config, run.layout_for(ranks)
    codec = run.compression.codec
    whole = codec.shaped and codec.linear  # sums of it are those of any vector
    in_tiers = run.compression.encodes and not whole and run.path.tiers(0, ranks, 0) is not None
    against = (
        (not run.sync.regroups, f"--sync {given.sync}"),
        (in_tiers, f"--collective {given.collective} and --compression {given.compression}"),
        (layout.splits or layout.zero1 or layout.table > 1, f"--parallel {given.parallel}"),
        (config.model.compile, "--compile"),
        (run.path.by_priority, f"--collective {given.collective}"),  # a step is applied by layers, not by all or none
        (run.tuning.changes_later, f"--tune {run.tuning.text}"),
        (config.training.device != "cpu" and torch.cuda.device_count() > 0, f"--device {config.training.device}"),
    )
    return next((flag for stands, flag in against if stands), "")


def _check_replicas(run: ResolvedRun, ranks: int) -> None:
    """Refuse what acts between replicas where several ranks make one."""
    layout, given = run.layout_for(ranks), run.described.strategy
    if run.sync.replica_is_one_rank and layout.splits:
        raise UserError(
            f"--sync {given.sync} with --parallel {given.parallel}: each part of a model has links of its own, "
            "and would choose different periods: give a number, such as period=8"
        )
    if layout.dp > 1 or ranks == 1 or run.sync.uses_servers:
        return
    two = replace(layout, sizes={Axis.DP: 2, **{a: size for a, size in layout.sizes.items() if a is not Axis.DP}})
    for flag, value, acts in (
        ("--sync", given.sync, not run.sync.sums_in_backward),
        ("--compression", given.compression, run.compression.encodes),
        ("--collective", given.collective, not run.path.by_backend or run.path.by_priority),
    ):
        if acts:
            raise UserError(
                f"{flag} {value} acts between replicas, and --parallel {given.parallel} makes one of {ranks} "
                f"workers: use --parallel {two} with {2 * ranks}, or leave {flag} out"
            )


def _check_servers(run: ResolvedRun, ranks: int) -> None:
    """Refuse what does not go together with servers that hold the parameters.

    Args:
        ranks: processes of all machines' workers; where the model is split, a worker is several.
    """
    config = run.config
    sync, size = f"--sync {run.described.strategy.sync}", _worker_size(run, ranks)
    if config.training.precision == "fp16":
        raise UserError(f"{sync} has no gradient scaler on its servers: use --precision bf16 or fp32")
    if config.model.compile_mode == "reduce-overhead":
        raise UserError(
            f"{sync} sends gradients while the next step computes, and a replayed CUDA graph overwrites "
            "them: leave out --compile-mode reduce-overhead"
        )
    if config.model.sync_batchnorm:
        raise UserError(f"{sync} has no group for --sync-batchnorm: leave it out, or use --sync allreduce")
    if run.path.by_backend and run.path.by_priority:
        raise UserError(
            f"{sync} has no collectives: leave out --collective; pushes and pulls are ordered by ps(order=priority)"
        )
    if not run.path.by_backend:
        raise UserError(f"{sync} has no collectives: leave out --collective")
    _check_order(run, sync, size)
    run.sync.check_run(
        workers=ranks * run.nodes.least // run.nodes.most // size,
        clips=config.optimizer.clip_norm > 0,
        has_momentum=_has_momentum(run, config.optimizer),
    )
    _check_optimizer_on_servers(run, sync)


def _check_order(run: ResolvedRun, sync: str, size: int) -> None:
    """Refuse to send first what forward needs first where forward waits for everything (UserError)."""
    against = _against_order(run, size) if server_settings(run.sync).by_priority else None
    if against is not None:
        raise UserError(f"{sync} with {against}, before the first layer: leave one of them out")


def _against_order(run: ResolvedRun, size: int) -> str | None:
    """Return the setting that makes forward wait for everything, and why; None: none does.

    Args:
        size: ranks of a worker.
    """
    config = run.config
    against = (
        (size > 1, f"--parallel {run.described.strategy.parallel}", "its first rank gives all ranks their parameters"),
        (config.model.compile, "--compile", "compiled code reads all layers"),
        (PRECISIONS[config.training.precision].parameters is not None, f"--precision {config.training.precision}",
         "all parameters are converted"),
    )  # fmt: skip
    return next((f"{flag}: {reason} at once" for stands, flag, reason in against if stands), None)


def _worker_size(run: ResolvedRun, ranks: int) -> int:
    """Return the ranks of a worker of servers.

    Raises:
        UserError: the layout is not the world, or a worker would lie on several machines.
    """
    size, of_machine = run.layout_for(ranks).model_size, ranks // run.nodes.most
    if of_machine % size:
        given = run.described.strategy
        raise UserError(
            f"--sync {given.sync} with --parallel {given.parallel}: a replica is {size} ranks of "
            f"one machine, and {of_machine} workers on each are no whole number of replicas; "
            f"use --workers {size * max(1, of_machine // size)}, or smaller replicas"
        )
    return size


def _has_momentum(run: ResolvedRun, optimizer: OptimizerConfig) -> bool:
    traits = run.optimizer.user_traits
    return traits.momentum > 0 if traits else is_sgd(optimizer.name) and optimizer.momentum > 0


def _momentum(run: ResolvedRun) -> float:
    """Return the momentum of SGD that the optimizer itself applies; 0: none, or its own class does not say."""
    optimizer = run.config.optimizer
    traits = run.optimizer.user_traits
    if traits is not None:
        return traits.momentum if traits.is_sgd else 0.0
    return optimizer.momentum if is_sgd(optimizer.name) else 0.0


def _check_optimizer_on_servers(run: ResolvedRun, sync: str) -> None:
    """Refuse an optimizer that servers cannot step or save, each of which has some of the tensors."""
    traits, name = run.optimizer.user_traits, run.optimizer.name
    if run.optimizer.reach is Reach.MODEL:
        raise UserError(
            f"{sync} with --optimizer {name}: an update depends on other tensors, and each server has some of them; "
            f"use --sync allreduce{run.optimizer.hint}"
        )
    if traits is not None and not traits.in_state:
        raise UserError(
            f"{sync} with --optimizer {name}: servers save self.state[parameter], and its steps also depend on what "
            "they leave in its param_groups: keep that in the state, or use --sync allreduce"
        )


def _check_optimizer(run: ResolvedRun, ranks: int) -> None:
    """Refuse an optimizer whose replicas would part, and momentum of the user's where the codec's is before it."""
    traits, given, codec = run.optimizer.user_traits, run.described.strategy, run.compression.codec
    name = run.optimizer.name
    if run.optimizer.draws and ranks > 1 and run.sync.sums_in_backward:
        raise UserError(
            f"--sync {given.sync} with --optimizer {name}: its steps draw random numbers, so that replicas would part; "
            "use --workers 1, or --sync local(8), whose replicas agree again"
        )
    before = codec.momentum_inside or codec.absorbs_momentum or run.compression.leaves_momentum
    if traits is not None and traits.momentum and before and run.sync.encodes_gradients:
        raise UserError(
            f"--compression {given.compression} with --optimizer {name}: its momentum {traits.momentum:g} would act "
            "after decoding, and only that of --optimizer sgd or momentum can be moved before it; give yours momentum "
            "0, or use --compression int8"
        )


def interplay_notes(run: ResolvedRun, ranks: int, on_gpu: bool = False) -> list[str]:
    """Say, in sentences, which settings work otherwise than they would without the run's other choices.

    Args:
        on_gpu: whether this rank is known to train on a GPU.
    """
    notes = [*run.optimizer.notes(run.config.optimizer.weight_decay), *_rate_notes(run), *_model_notes(run)]
    notes += unused_notes(run)
    if run.sync.uses_servers and run.config.launch.balance == "auto":
        given = run.described.strategy.sync
        notes.append(f"--balance auto does nothing: workers of --sync {given} take a batch whenever they are done")
    if run.config.model.compile_mode == "reduce-overhead" and not (on_gpu or torch.cuda.device_count()):
        notes.append("--compile-mode reduce-overhead does nothing on a processor: CUDA graphs are a GPU's")
    notes += [] if on_gpu else _numpy_notes(run, ranks)
    if ranks == 1:
        return notes
    notes += [*([] if on_gpu else _device_notes(run, ranks)), *_momentum_notes(run), *_path_notes(run, ranks)]
    if not run.sync.uses_servers:
        of_optimizer = run.sync.optimizer_notes(run.optimizer.name, run.layout_for(ranks).dp)
        notes += [f"--sync {run.described.strategy.sync}: {note}" for note in of_optimizer]
    return [*notes, *run.sync.momentum_notes(_momentum(run), ranks)]


def _rate_notes(run: ResolvedRun) -> list[str]:
    """Say that a rate is one of SGD, where the optimizer moves each number by about the rate."""
    chosen = run.config.optimizer
    if not moves_by_rate(chosen.name) or chosen.lr <= _LARGE_RATE:
        return []
    return [
        f"--optimizer {chosen.name} at --lr {chosen.lr:g}, which is a rate for sgd: each step moves a weight by "
        "about as much; --lr 0.001 is usual"
    ]


def _numpy_notes(run: ResolvedRun, ranks: int) -> list[str]:
    """Say why numpy computes on a processor what codecs have compiled loops for."""
    encodes = ranks > 1 or run.sync.uses_servers
    device, has_gpus = run.config.training.device, torch.cuda.device_count() >= -(-ranks // run.nodes.most)
    if not encodes or device == "cuda" or (device == "auto" and has_gpus):
        return []
    return [f"--compression {run.described.strategy.compression}: {n}" for n in run.compression.numpy_notes()]


def _device_notes(run: ResolvedRun, ranks: int) -> list[str]:
    """Say that GPUs which are there stay unused: `auto` takes them where each worker of a machine has one."""
    workers, gpus = -(-ranks // run.nodes.most), torch.cuda.device_count()
    if run.config.training.device != "auto" or not 0 < gpus < workers:
        return []
    return [
        f"--device auto: {gpus} GPU{'s' * (gpus > 1)} for {workers} workers of this machine: they train on its "
        f"processor; --workers {gpus} trains on GPUs"
    ]


def _model_notes(run: ResolvedRun) -> list[str]:
    """Say what is done with a model of a library that its name does not say."""
    name, folder = run.config.model.name, run.config.model.name.removeprefix(TRANSFORMERS)
    if name.removeprefix("torchvision/") in WITHOUT_AUXILIARY_HEADS:
        return [
            f"--model {name} is built without its auxiliary heads: to train these, name a function that builds it "
            "(module:function), and a --loss that adds theirs"
        ]
    if folder == name or folder != run.config.data.tokeniser:
        return []
    return [f"texts are cut by the tokeniser in {folder}, the model's own; --tokeniser names another"]


def length_notes(run: ResolvedRun, steps: int, ranks: int, encodes: bool = True) -> list[str]:
    """Say, in sentences, what begins and ends a run of so many steps, and whether it is too short for its choices.

    Args:
        encodes: the codec has something to encode.
    """
    if ranks == 1 or run.sync.uses_servers:
        return []
    given = run.described.strategy
    notes = [f"--sync {given.sync}: {note}" for note in run.sync.length_notes(steps)]
    of_codec = run.sync.settled(run.compression, steps).length_notes() if encodes else []
    if encodes and (together := run.sync.synchronous_steps) and steps:
        first = min(together, run.compression.for_run(steps).codec.whole_steps(steps).first)
        of_codec += [f"the first {first} of {together} synchronous steps' messages are whole"] if first else []
    return [*notes, *(f"--compression {given.compression}: {note}" for note in of_codec)]


def _momentum_notes(run: ResolvedRun) -> list[str]:
    asked = run.described.optimizer.momentum
    if run.config.optimizer.momentum == asked:
        return []
    codec = run.compression.codec
    late = "; Nesterov's form (--optimizer sgd) makes up for what error feedback sends late"
    hint = late if codec.biased and not codec.looks_ahead else ""
    spec = run.described.strategy.compression
    return [f"momentum {asked:g} acts in each worker, before --compression {spec} encodes{hint}"]


def _path_notes(run: ResolvedRun, ranks: int) -> list[str]:
    if run.sync.uses_servers or run.path.by_backend or run.layout_for(ranks).dp != 2:
        return []
    if run.path.by_priority:
        return []
    spec = run.described.strategy.collective
    return [f"between 2 replicas all paths are one: --collective {spec} changes nothing"]


_DROP_RATES = ("drop_prob", "drop_rate", "attention_dropout")
"""Numbers of modules of timm and transformers that drop without a layer of torch's for it."""


def sent_whole_notes(run: ResolvedRun, model: nn.Module, ranks: int) -> list[str]:
    """Say where a codec has nothing to encode, because all parameters that train are sent whole."""
    if not run.compression.encodes or run.sync.uses_servers or ranks == 1:
        return []
    note = nothing_to_encode(run.described.strategy.compression, model.parameters())
    return [note] if note else []


def batchnorm_notes(run: ResolvedRun, model: nn.Module, ranks: int) -> list[str]:
    """Say where there is no BatchNorm to make that of the whole batch; of a stage of a pipeline others may have it."""
    unasked = not run.config.model.sync_batchnorm or run.layout_for(ranks).pp > 1 or isinstance(model, KerasModule)
    if unasked or any(isinstance(module, BatchNormBase) for module in model.modules()):
        return []
    return ["--sync-batchnorm does nothing: the model has no BatchNorm"]


def still_notes(run: ResolvedRun, model: nn.Module) -> list[str]:
    """Say which parts of the configuration of a model for sounds do nothing."""
    if not run.config.model.name.startswith(TRANSFORMERS) or not hasattr(model, "config"):
        return []
    if not hasattr(model.config, "apply_spec_augment") or run.config.data.features == AUTO:
        return []
    return [
        "layerdrop and apply_spec_augment of the model's config.json are off, for what they draw is not the run's: "
        "--augment auto masks the sounds instead"
    ]


def worker_notes(model: nn.Module, data_size: int, sync_batchnorm: bool) -> list[str]:
    """Say in one line what of a model makes its losses differ from those of another number of workers.

    Args:
        data_size: parts that a batch is cut into; with one part nothing differs.
        sync_batchnorm: whether statistics are those of the whole batch.
    """
    if data_size == 1:
        return []
    said = []
    normed = next((name for name, module in model.named_modules() if _takes_statistics(module)), None)
    if normed is not None and not sync_batchnorm:
        said.append(f"BatchNorm ({normed}) takes statistics of each worker's part (--sync-batchnorm: of all)")
    drawing = next((name or type(module).__name__ for name, module in model.named_modules() if _drops(module)), None)
    if drawing is not None:
        said.append(f"dropout ({drawing}) draws other numbers on each worker")
    for module in model.modules():
        if isinstance(module, KerasModule):
            said += [f"BatchNorm ({name}) takes statistics of each worker's part" for name in module.measuring[:1]]
            said += [f"what {name} draws is the same for each worker's part" for name in module.drawing[:1]]
    return [f"the loss curve depends on the number of workers: {'; '.join(said)}"] if said else []


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, BatchNormBase) and module.training


def _drops(module: nn.Module) -> bool:
    if isinstance(module, DropoutNd):
        return module.p > 0 and module.training
    rates = [getattr(module, name, None) for name in _DROP_RATES]
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)
