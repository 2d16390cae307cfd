"""Weights from a file: safetensors, a torch state dict, or the checkpoint of another trainer.

No code is unpickled; a misfit is refused in one line. A head of another size is made anew where that is asked for, and
position embeddings of another grid are interpolated; what was done with each name that differs is returned.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.torch_compat import COMPILED

WRAPPERS = ("module.", COMPILED)
NESTED = ("state_dict", "model", "model_state_dict", "module")  # Lightning, Horovod's examples, torch's, DeepSpeed
COUNTER = "num_batches_tracked"
DEEPSPEED = "mp_rank_00_model_states.pt"
IN_FOLDERS = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    DEEPSPEED,
)
"""What a folder of weights may hold (transformers, Accelerate, zero_to_fp32.py, DeepSpeed), the first one is read."""


@dataclass(frozen=True)
class LoadedWeights:
    """What became of the names of a file of weights.

    Attributes:
        origin: the file, or the run.
        loaded: tensors that were taken from it.
        new: of the model, with their values as initialised: of a head that was made anew, or counters.
        unexpected: of the file, and not used.
        reshaped: of both, brought to the model's size: `pos_embed 197x384 -> 65x384`.
        remark: what else is to be known of them.
    """

    origin: str
    loaded: int
    new: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    remark: str = ""

    @property
    def made_anew(self) -> list[str]:
        """The names of `new` that are not counters."""
        return [name for name in self.new if not name.endswith(COUNTER)]

    def __str__(self) -> str:
        new = self.made_anew
        parts = [f"weights of {self.origin}: {self.loaded} tensors"]
        parts += [f"made anew: {_some(new)}"] if new else []
        parts += [f"of another size: {_some(self.reshaped)}"] if self.reshaped else []
        parts += [f"not used: {_some(self.unexpected)}"] if self.unexpected else []
        parts += [self.remark] if self.remark else []
        return "; ".join(parts)


def load_weights(model: nn.Module, path: Path, head: str = "auto") -> LoadedWeights:
    """Copy a file's tensors into the model, as `load_state` does.

    Raises:
        UserError: the file cannot be read, or does not fit: names the first parameter, both shapes, and the fix.
    """
    return load_state(model, read_weights(path), str(path), head)


def load_state(model: nn.Module, state: Mapping[str, Tensor], origin: str, head: str = "auto") -> LoadedWeights:
    """Copy tensors into the model; every parameter and buffer must be there, with its shape.

    Names may have a prefix that the model's have not, such as a LightningModule's `model.`, or lack the one that all
    but the head of the model's have (`bert.`); what has another prefix (a loss, a metric) is passed over. BatchNorm's
    batch counter may be missing (older files have none). Position embeddings of another grid are interpolated by timm;
    those of texts give the rows that both have. Names of older versions are read as today's, a tied parameter by either
    of its names; whole numbers that the model has not are indices, and passed over.

    Args:
        origin: what a refusal calls them: the file, or the run.
        head: `keep`: the head must fit; `new`: it keeps its own values; `auto`: it does where the file has none of its
            shape. With a new head, what the file has beside the network (its own heads) is not used.

    Raises:
        UserError: they do not fit: names the first parameter, both shapes, and the fix.
    """
    model_state = model.state_dict()
    taken = _renamed(dict(_without_prefix(dict(state), model_state, origin)), model, model_state)
    taken |= {name: taken[other] for name, other in tied_names(model).items() if name not in taken and other in taken}
    reshaped = _interpolate(taken, model_state, positions := _positions(model))
    reshaped += _with_own_places(taken, model_state, positions)
    names = head_names(model) - _fitting_poolers(taken, model_state)
    if head == "new" and (tied := sorted(names & set(tied_names(model)))):
        raise UserError(
            f"--head new: {tied[0]} of {type(model).__name__} is {tied_names(model)[tied[0]]} as well, which is "
            "loaded: it has no head of its own"
        )
    is_new = head == "new" or (
        head == "auto"
        and any(name not in taken or _only_classes_differ(name, taken[name], model_state[name]) for name in names)
    )
    passed_over: list[str] = []
    if is_new and len(names) < len(model_state):
        bodies = {name.partition(".")[0] for name in model_state if name not in names}
        passed_over = [
            name
            for name in taken
            if name.partition(".")[0] not in bodies or (_is_pooler(name) and name not in model_state)
        ]
        taken = {name: taken[name] for name in taken if name not in names and name not in passed_over}
    else:
        names = set()
    passed_over += [name for name in taken if name not in model_state and not taken[name].is_floating_point()]
    passed_over += [name for name in _of_other_tasks(model, taken, model_state) if name not in passed_over]
    taken = {name: tensor for name, tensor in taken.items() if name not in passed_over}
    _check(taken, model_state, names, origin)
    model.load_state_dict(taken, strict=False)
    new = tuple(name for name in model_state if name not in taken)
    return LoadedWeights(origin, len(taken), new, tuple(passed_over), tuple(reshaped))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that the model has under several, each with the first one."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            names[name] = known
    return names


_OLDER = (
    (re.compile(r"\.gamma$"), ".weight"),  # BERT's of TensorFlow
    (re.compile(r"\.beta$"), ".bias"),
    (re.compile(r"\.weight_g$"), ".parametrizations.weight.original0"),  # torch's weight norm of before
    (re.compile(r"\.weight_v$"), ".parametrizations.weight.original1"),
    (re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)"), r"\1\2"),  # torchvision's DenseNet
)


def _renamed(state: dict[str, Tensor], model: nn.Module, model_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that the model has, where published files have others; all others as they are."""
    names = {}
    for name in state:
        newer = next((new for old, to in _OLDER if (new := old.sub(to, name)) != name), name)
        names[name] = newer if name not in model_state and newer in model_state and newer not in state else name
    state = {names[name]: tensor for name, tensor in state.items()}
    if 2 * sum(name not in state for name in model_state) < len(model_state):
        return state
    module = sys.modules.get(type(model).__module__)  # timm knows what its models' files were called by others
    convert = getattr(module, "checkpoint_filter_fn", None) if type(model).__module__.startswith("timm.") else None
    try:
        return state if convert is None else dict(convert(state, model))
    except (KeyError, IndexError, AttributeError, ValueError, RuntimeError):
        return state  # it is of no such model, which is told by its names


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read name -> tensor from safetensors or a torch file, on the CPU; the format is told by the content.

    A dict nested under `state_dict` (Lightning), `model`, `model_state_dict` or `module` (DeepSpeed) is unwrapped, and
    so are the prefixes of DistributedDataParallel (`module.`) and torch.compile (`_orig_mod.`). Of a folder the weights
    in it are read: one file, several with an index beside them, or DeepSpeed's newest.

    Raises:
        UserError: no such file, or not such a file, or it holds other things than tensors or only parts of them.
    """
    file = _file_in(path) if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--weights {path}: no such file; name a file of weights")
    if file.name == DEEPSPEED:
        _refuse_pieces(file.parent)
    if file.name.endswith(".index.json"):
        return {name: tensor for piece in _pieces(file) for name, tensor in _unwrap(_read(piece), piece).items()}
    return _unwrap(_read(file), file)


def _file_in(folder: Path) -> Path:
    latest = folder / "latest"
    if latest.is_file():  # DeepSpeed: the name of the folder with the newest checkpoint
        folder = folder / Path(latest.read_text(encoding="utf-8").strip()).name
    _refuse_pieces(folder)
    for name in IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"--weights {folder}: this is a folder, without {', '.join(IN_FOLDERS)}; name a file of weights")


def _refuse_pieces(folder: Path) -> None:
    """Refuse checkpoints whose tensors are divided, with the command that puts them together (UserError)."""
    if (folder / f"zero_pp_rank_0_{DEEPSPEED}").exists():
        raise UserError(
            f"--weights {folder}: ZeRO-3 has divided the parameters: run the zero_to_fp32.py that DeepSpeed has put "
            "beside the checkpoint, and name what it writes"
        )
    if (folder / DEEPSPEED.replace("00", "01")).exists():
        raise UserError(
            f"--weights {folder}: its tensors are divided among tensor-parallel ranks: save the whole state dict where "
            "it was trained"
        )
    if (folder / ".metadata").exists():
        raise UserError(
            f"--weights {folder}: a sharded checkpoint of torch: make one file of it with python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE"
        )


def _pieces(index: Path) -> list[Path]:
    """Return the files that an index names, all of them beside it.

    Raises:
        UserError: it cannot be read, or names a file elsewhere or one that is not there.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"--weights {index} is no index of weights: it has no weight_map") from error
    pieces = [index.parent / Path(str(name)).name for name in names]
    missing = [piece for name, piece in zip(names, pieces, strict=True) if piece.name != name or not piece.is_file()]
    if missing:
        raise UserError(f"--weights {index} names {missing[0].name}, which is not beside it: copy all of its files")
    return pieces


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if len(start) == 9 and start[8:] == b"{":
            return _read_safetensors(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a damaged file may raise any
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        if refused:
            why = f"it holds an object of {refused[1]} beside tensors: save model.state_dict() alone where it was made"
        raise UserError(
            f"--weights {path} cannot be read as safetensors or as a torch state dict saved with torch.save ({why}); "
            "nothing else is unpickled"
        ) from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping) and any(isinstance(content.get(key), Mapping) for key in NESTED):
        content = next(content[key] for key in NESTED if isinstance(content.get(key), Mapping))
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise UserError(f"--weights {path} holds no state dict (name -> tensor): save model.state_dict()")
    state = {str(name): tensor for name, tensor in content.items()}
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _without_prefix(state: dict[str, Tensor], model_state: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Return the tensors under the one prefix after which all of the model's names follow; all, where there is none.

    Raises:
        UserError: several such models are in the file.
    """
    names = [name for name in model_state if not name.endswith(COUNTER)]
    if not names or all(name in state for name in names):
        return state
    candidates = [name.removesuffix(names[0]) for name in state if name.endswith(f".{names[0]}")]
    prefixes = [prefix for prefix in candidates if all(prefix + name in state for name in names)]
    if len(prefixes) > 1:
        raise UserError(
            f"--weights {origin} holds {len(prefixes)} such models, under {' and '.join(prefixes)}: "
            "save the state dict of the one that is meant"
        )
    if prefixes:
        return {
            name.removeprefix(prefixes[0]): tensor for name, tensor in state.items() if name.startswith(prefixes[0])
        }
    for prefix in {
        name.partition(".")[0] for name in names
    }:  # transformers: a base model's file lacks the one of its place
        inside = [name.removeprefix(f"{prefix}.") for name in names if name.startswith(f"{prefix}.")]
        if len(inside) * 2 > len(names) and all(name in state for name in inside if not _is_pooler(name)):
            return {f"{prefix}.{name}" if name in inside else name: tensor for name, tensor in state.items()}
    return state


def _positions(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that have a row for each place in a text."""
    structure = getattr(model, "structure", None)
    return structure.positions if isinstance(structure, Hints) else ()


def _with_own_places(
    state: dict[str, Tensor], model_state: Mapping[str, Tensor], positions: Sequence[str]
) -> list[str]:
    """Give texts of another length the rows that both have, in place, and the model's own behind; say which."""
    done = []
    for name in positions:
        has, wanted = state.get(name), model_state[name]
        if has is None or has.ndim != 3 or has.shape == wanted.shape or has.shape[2] != wanted.shape[2]:
            continue
        both = min(has.shape[1], wanted.shape[1])
        state[name] = torch.cat([has[:, :both].to(wanted.dtype), wanted[:, both:].to(has.device)], dim=1)
        done.append(f"{name} {_shape(has)} -> {_shape(wanted)}: the first {both}")
    return done


def _interpolate(state: dict[str, Tensor], model_state: Mapping[str, Tensor], texts: Sequence[str] = ()) -> list[str]:
    """Bring position embeddings `(1, positions, width)` in a file to the model's grid, in place; say which, and how.

    Args:
        texts: those of texts, which have no grid.
    """
    from timm.layers import resample_abs_pos_embed

    done = []
    for name, wanted in model_state.items():
        has = state.get(name)
        if has is None or "pos" not in name.rpartition(".")[2] or has.ndim != 3 or wanted.ndim != 3 or name in texts:
            continue
        if has.shape == wanted.shape or has.shape[2] != wanted.shape[2]:
            continue
        prefixed = [
            extra for extra in (0, 1, 2, 5) if _is_square(has.shape[1] - extra) and _is_square(wanted.shape[1] - extra)
        ]
        if not prefixed:
            continue
        side = math.isqrt(wanted.shape[1] - prefixed[0])
        state[name] = resample_abs_pos_embed(has, [side, side], num_prefix_tokens=prefixed[0])
        done.append(f"{name} {_shape(has)} -> {_shape(wanted)}")
    return done


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def _check(state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], new: Set[str], origin: str) -> None:
    missing = [n for n in model_state if n not in state and n not in new and not n.endswith(COUNTER)]
    unexpected = [name for name in state if name not in model_state]
    if missing or unexpected:
        what = f"has no {missing[0]!r}" if missing else f"has {unexpected[0]!r}, which the model has not"
        raise UserError(
            f"--weights {origin} {what} ({len(missing)} missing, {len(unexpected)} unexpected of {len(model_state)}): "
            "it is of another model; name that one with --model"
        )
    wrong = [name for name in model_state if name in state and state[name].shape != model_state[name].shape]
    if not wrong:
        return
    name = wrong[0]
    shapes = f"{name!r} is {_shape(state[name])} in the file and {_shape(model_state[name])} in the model"
    if all(_only_classes_differ(name, state[name], model_state[name]) for name in wrong):
        raise UserError(
            f"--weights {origin}: {shapes}: its classifier is for {len(state[name])} classes, the data has "
            f"{len(model_state[name])}: --head new makes a new one"
        )
    raise UserError(
        f"--weights {origin}: {shapes} ({len(wrong)} of {len(model_state)} differ): "
        "use the --model, channels and --image-size that the file was made with"
    )


def head_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of a model's head.

    The classifier that timm names; of transformers all that stands beside the base model, and the pooler at its end,
    which only some tasks have; else the last weight of two or more dims, and its bias.
    """
    names = list(model.state_dict())
    if type(model).__module__.startswith("transformers."):
        return _beside_base(model, names) or _last_weight(model.state_dict())
    if type(model).__module__.startswith("torchvision.models.segmentation"):
        return _of_segmentation(model.state_dict())
    cfg = getattr(model, "default_cfg", None) or {}
    heads = cfg.get("classifier") if isinstance(cfg, Mapping) else getattr(cfg, "classifier", None)
    heads = (heads,) if isinstance(heads, str) else tuple(heads or ())
    found = {name for name in names if any(name.startswith(f"{head}.") for head in heads)}
    return found or _last_weight(model.state_dict())


_CLASSIFIERS = ("classifier.low_classifier", "classifier.high_classifier", "aux_classifier", "classifier")


def _of_segmentation(state: Mapping[str, Tensor]) -> set[str]:
    """Return the last weights, and biases, of each classifier of a model of torchvision's: logits of both are added, or
    the auxiliary one is trained beside the other.
    """
    several = any(name.startswith(_CLASSIFIERS[:2]) for name in state)
    of_each = (
        {name: tensor for name, tensor in state.items() if name.startswith(f"{each}.")}
        for each in (_CLASSIFIERS[:2] if several else _CLASSIFIERS[2:])
    )
    return set().union(*map(_last_weight, of_each))


def _of_other_tasks(model: nn.Module, taken: Mapping[str, Tensor], model_state: Mapping[str, Tensor]) -> list[str]:
    """Return what published files of transformers hold beside a model: other heads, poolers, buffers of before."""
    if not type(model).__module__.startswith("transformers."):
        return []
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    base = str(getattr(model, "base_model_prefix", ""))
    has_base = bool(base) and isinstance(getattr(model, base, None), nn.Module)
    return [
        name
        for name in taken
        if name not in model_state
        and (
            _is_pooler(name)
            or any(each.search(name) for each in ignored)
            or (has_base and not name.startswith(f"{base}."))
        )
    ]


_HEADS = ("classifier", "score", "lm_head", "projector", "layer_weights")
"""Modules of transformers that are no part of the base model, where a model has none under its usual name."""


def _beside_base(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Return the names of a model of transformers that are not of its base model, or of that one's pooler."""
    base = str(getattr(model, "base_model_prefix", ""))
    if not base or not isinstance(getattr(model, base, None), nn.Module):
        return {name for name in names if name.partition(".")[0] in _HEADS}
    return {name for name in names if not name.startswith(f"{base}.") or _is_pooler(name)}


def _is_pooler(name: str) -> bool:
    return "pooler" in name.split(".")


def _fitting_poolers(state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]) -> set[str]:
    """Return the names of poolers that a file has: they stay with the base model, though the head is another."""
    return {n for n, tensor in model_state.items() if _is_pooler(n) and n in state and state[n].shape == tensor.shape}


_MATRICES = ("weight", "kernel")  # of torch, and of Keras


def _last_weight(model_state: Mapping[str, Tensor]) -> set[str]:
    last = next(
        (name for name in reversed(list(model_state)) if name.endswith(_MATRICES) and model_state[name].ndim >= 2), None
    )
    if last is None:
        return set()
    bias = f"{last.removesuffix('weight').removesuffix('kernel')}bias"
    return {last, bias} & set(model_state)


def _only_classes_differ(name: str, a: Tensor, b: Tensor) -> bool:
    if name.endswith("kernel"):  # Keras has outputs last
        a, b = a.movedim(-1, 0), b.movedim(-1, 0)
    return a.ndim == b.ndim > 0 and a.shape[1:] == b.shape[1:] and len(a) != len(b)


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
