"""Strategies by name: the files of this folder that define `build`, `kept` and `SETTINGS`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from echelon.core.errors import UserError, nearest
from echelon.core.spec import Spec, bind, parse_spec
from echelon.sync.base import Sync, SyncContext
from echelon.sync.state_bytes import Piece, StateBytes

_NOT_STRATEGIES = {"base", "registry", "buffers", "state_bytes"}
_PLANNED: tuple[str, ...] = ()


def names() -> list[str]:
    """Return the names of the strategies that exist."""
    folder = str(Path(__file__).parent)
    modules = pkgutil.iter_modules([folder])
    return sorted(m.name for m in modules if not m.ispkg and m.name not in _NOT_STRATEGIES)


def _module(spec: Spec) -> ModuleType:
    if spec.name not in names():
        if spec.name in _PLANNED:
            raise UserError(f"--sync {spec}: {spec.name} is not there yet; there is: {', '.join(names())}")
        hint = nearest(spec.name, [*names(), *_PLANNED])
        raise UserError(f"--sync {spec}: unknown strategy; {hint}there is: {', '.join(names())}")
    return importlib.import_module(f"echelon.sync.{spec.name}")


def check_sync(text: str, compression: str = "none") -> None:
    """Refuse a spec that cannot be built, or a codec that the strategy cannot send through.

    Raises:
        UserError: an unknown strategy or setting, with the nearest one; a combination, with one that works.
    """
    spec = parse_spec(text)
    module = _module(spec)
    settings = bind(spec, module.SETTINGS)
    if hasattr(module, "check"):
        module.check(settings, compression)


def encodes_gradients(text: str) -> bool:
    """Whether a strategy sends gradients through the codec; else it sends deltas, which have had their momentum."""
    return getattr(_module(parse_spec(text)), "ENCODES", "gradients") == "gradients"


def synchronous_steps(text: str) -> int:
    """Return for how many steps a strategy that averages parameters reduces gradients at first."""
    spec = parse_spec(text)
    return int(getattr(bind(spec, _module(spec).SETTINGS), "start", 0))


def kept_memory(text: str, compression: str, piece: Piece) -> StateBytes:
    """Return the memory that a strategy and its codec keep on a rank."""
    spec = parse_spec(text)
    module = _module(spec)
    found: StateBytes = module.kept(bind(spec, module.SETTINGS), compression, piece)
    return found


def build_sync(text: str, context: SyncContext) -> Sync:
    """Build a strategy from its spec."""
    spec = parse_spec(text)
    module = _module(spec)
    return module.build(bind(spec, module.SETTINGS), context)
