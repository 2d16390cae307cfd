"""The user's file of places: specs by names of the user's own, such as `mycluster: "slurm(partition=main)"`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.config.yaml_file import plain, read_yaml
from echelon.core.errors import UserError, naming, unknown
from echelon.core.spec import Spec, parse_spec


def places_file() -> Path:
    """Return the user's file of places: `$XDG_CONFIG_HOME/echelon/places.yaml`, or `~/.config/echelon/places.yaml`."""
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (config if config.is_absolute() else Path("~/.config").expanduser()) / "echelon" / "places.yaml"


def _named_places() -> dict[str, str]:
    """Return the specs of the user's file of places by name.

    Raises:
        UserError: it cannot be read.
    """
    file = places_file()
    node = read_yaml(file) if file.exists() else None
    named = plain(node, str(file)) if node is not None else {}
    if not isinstance(named, dict) or not all(isinstance(v, str) for v in named.values()):
        raise UserError(f'{file}: expected a spec for each name, such as `mycluster: "slurm(partition=main)"`')
    return {str(name): value for name, value in named.items()}


def read_place(text: str, known: Sequence[str]) -> Spec:
    """Return a place's spec; a name of the user's file stands for what it has there, and `text` overrides settings.

    Args:
        known: names of the places that there are.

    Raises:
        UserError: the text, or the file, cannot be read; there is no such place.
    """
    spec = parse_spec(text)
    if spec.name in known:
        return spec
    named = _named_places()
    if spec.name not in named:
        raise unknown("place", spec.name, [*known, *named, "module:Class"])
    with naming(str(places_file())):
        of_file = parse_spec(named[spec.name])
        if of_file.name not in known:
            raise unknown("place", of_file.name, known)
    if of_file.args or spec.args:
        raise UserError(f"{places_file()}: {spec.name}: name each setting")
    return replace(spec, name=of_file.name, kwargs=tuple((dict(of_file.kwargs) | dict(spec.kwargs)).items()))
