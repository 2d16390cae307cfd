"""A caller's own model, data and task as bytes, for processes that this one starts.

They travel by value: classes and functions of a script, a notebook or a REPL go along with what they hold, so that no
child imports the script again. A parcel goes through the pipe that a child inherits, and nowhere else: nothing that
came from the network or from a checkpoint is unpickled.
"""

from __future__ import annotations

import io
import marshal
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from types import CodeType
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize

from echelon.core.errors import UserError
from echelon.torch_compat import inject_parametrized_class, inject_parametrized_property
from echelon.trainer.assemble import UserObjects

_PROTOCOL = 5


class Parcel:
    """Objects as bytes; each child opens its own copy.

    Tensors that share memory share it again in the copy; all of them are on the CPU.

    Attributes:
        for_roles: what the scheduler and the servers of a run need of it, without model and data; None: nothing.
    """

    def __init__(self, contents: bytes, for_roles: Parcel | None = None) -> None:
        self._contents, self.for_roles = contents, for_roles

    @classmethod
    def of(cls, objects: UserObjects) -> Parcel:
        """Pack a caller's objects.

        Raises:
            UserError: one of them cannot be sent; says which, and why.
        """
        try:
            for_roles = replace(objects, model=None, source=None, task=None, loss=None, metrics=None)
            return cls(_packed(objects), cls(_packed(for_roles)) if for_roles != UserObjects() else None)
        except Exception as error:
            raise _refusal(objects, error) from error

    def open(self) -> UserObjects:
        """Return the objects, in this process's own memory."""
        objects = _unpacked(self._contents)
        assert isinstance(objects, UserObjects)
        return objects

    def __repr__(self) -> str:
        return f"Parcel({len(self._contents):,} bytes)"


def _packed(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=sys.modules[__name__], pickle_protocol=_PROTOCOL)
    return stream.getvalue()


def _unpacked(contents: bytes) -> object:
    return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=False)


def _refusal(objects: UserObjects, error: Exception) -> UserError:
    """Say which of the objects cannot be sent."""
    for item in fields(objects):
        try:
            _packed(getattr(objects, item.name))
        except Exception as reason:  # noqa: BLE001 - whatever a caller's class raises when it is pickled
            what, error = {"source": "data"}.get(item.name, item.name), reason
            break
    else:
        what = "what you gave"
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(f"{what} of your own cannot be sent to the workers: {why}; make that inside of its methods")


class Pickler(cloudpickle.Pickler):
    """What `torch.save` pickles with: by value where a class cannot be imported, parametrised modules too."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is rebuilt.

        Code keeps the file that it is of, which errors name; weight_norm and the like make classes that refuse to be
        pickled.
        """
        if isinstance(obj, CodeType):
            return marshal.loads, (marshal.dumps(obj),)  # for the same interpreter
        if isinstance(obj, nn.Module) and not isinstance(obj, type) and parametrize.is_parametrized(obj):
            parametrizations = obj.parametrizations
            assert isinstance(parametrizations, nn.ModuleDict)
            made_of = parametrize.type_before_parametrizations(obj), tuple(parametrizations)
            return _parametrized, made_of, obj.__dict__, None, None, _set_state
        return super().reducer_override(obj)


def _parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty module of a class, with these of its tensors parametrised."""
    module = kind.__new__(kind)
    inject_parametrized_class(module)
    for name in names:
        inject_parametrized_property(module, name)
    return module


def _set_state(module: nn.Module, state: Mapping[str, object]) -> None:
    module.__dict__.update(state)
