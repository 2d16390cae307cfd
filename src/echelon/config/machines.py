"""Machines as `--at` describes them (workers, speed, links, price), and places by names of the user's own file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.core.errors import UserError, naming, unknown
from echelon.core.link import Link, parse_link
from echelon.core.spec import Quantity, Spec, bind, parse_spec, show_value

FLAG = "--at"
FASTEST_INSIDE = Link(8e10)
"""Between workers of one machine where nothing is said: 10 GB/s, which shared memory reaches."""


@dataclass(frozen=True)
class MachineWords:
    """The words of `--at`, before they are checked against each other.

    Attributes:
        workers: processes in all, each with a device of its own.
        per_machine: of them on one machine.
        link: between machines; a word such as `1gbit`, or text such as "10mbit,20ms".
        inside: between workers of a machine.
        processors: of one machine, which its workers share; 0: each has its own.
        memory: of a worker's device.
        speed: of a worker, in those that were measured.
        tflops: that a worker reaches at best, in 10^12 operations a second, where its speed is not measured.
        price: of a worker for an hour, in whatever currency.
        mtbf: mean time between failures of one machine.
    """

    workers: int
    per_machine: int = 1
    link: Quantity | str = "loopback"
    inside: Quantity | str = ""
    processors: int = 0
    memory: Quantity | None = None
    speed: float = 1.0
    tflops: float = 0.0
    price: float = 0.0
    mtbf: Quantity | None = None


@dataclass(frozen=True)
class Machines:
    """Machines that are alike, and the links of each worker.

    Attributes:
        name: as they were described.
        link: between machines; None: as measured.
        inside: between workers of one machine; None: as measured.
        processors: as in `MachineWords`.
        memory_bytes: of a worker; infinite: not said.
        speed: of a worker, in those that were measured.
        tflops: as in `MachineWords`; 0: the speed is measured.
        price_per_hour: of all workers.
        mtbf_s: of one machine; infinite: none fails.
    """

    name: str
    workers: int
    per_machine: int = 1
    link: Link | None = None
    inside: Link | None = None
    processors: int = 0
    memory_bytes: float = math.inf
    speed: float = 1.0
    tflops: float = 0.0
    price_per_hour: float = 0.0
    mtbf_s: float = math.inf

    @property
    def count(self) -> int:
        """Machines."""
        return -(-self.workers // self.per_machine)

    @property
    def pace(self) -> float:
        """The speed of a worker while all of its machine compute."""
        beside = min(self.workers, self.per_machine)
        return self.speed * min(1.0, (self.processors or beside) / beside)

    @property
    def narrowest(self) -> Link | None:
        """The link that a ring over all workers goes through most slowly; None: as measured."""
        if self.count > 1:
            return self.link
        return self.inside


def read_at(text: str) -> list[Machines]:
    """Read one `--at`: `workers=64, link=1gbit, memory=24GB, price=2.5`, or a YAML file with a list of such mappings.

    Raises:
        UserError: names what cannot be read.
    """
    with naming(FLAG):
        if text.endswith((".yaml", ".yml")):
            return _from_file(Path(text))
        return [_checked(text)]


def _from_file(path: Path) -> list[Machines]:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    from echelon.config.yaml_file import plain, read_yaml  # late: a command may read no file

    node = read_yaml(path)
    rows = plain(node, path.name) if node is not None else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} must be a list of machines, each such as: {{workers: 8, link: 1gbit, price: 2}}")
    return [_checked(", ".join(f"{key}={_word(value)}" for key, value in row.items())) for row in rows]


def _word(value: object) -> str:
    text = str(value)
    return show_value(text) if "," in text else text


def _checked(text: str) -> Machines:
    try:
        spec = parse_spec(f"at({text})")
    except UserError as error:
        has_link = "link=" in text or "inside=" in text
        raise UserError(f"{error}" + '; write a link with a delay as link="10mbit,20ms"' * has_link) from error
    described = bind(spec, MachineWords)
    _check_positive(described)
    link, inside = _link("link", described.link), _link("inside", described.inside)
    return Machines(
        name=" ".join(text.split()),
        workers=described.workers,
        per_machine=described.per_machine,
        link=link,
        inside=inside or (FASTEST_INSIDE if described.per_machine > 1 else None),
        processors=described.processors,
        memory_bytes=_quantity("memory", described.memory, "size"),
        speed=described.speed,
        tflops=described.tflops,
        price_per_hour=described.price * described.workers,
        mtbf_s=_quantity("mtbf", described.mtbf, "duration"),
    )


def _check_positive(described: MachineWords) -> None:
    for name in ("workers", "per_machine", "speed"):
        if getattr(described, name) <= 0:
            raise UserError(f"{name} must be above 0, not {getattr(described, name)}")
    for name in ("processors", "tflops", "price"):
        if getattr(described, name) < 0:
            raise UserError(f"{name} must not be below 0")


def _link(name: str, value: Quantity | str) -> Link | None:
    text = str(value)
    if text in ("", "loopback"):
        return None
    with naming(name):
        return parse_link(text)


def _quantity(name: str, value: Quantity | None, kind: str) -> float:
    if value is None:
        return math.inf
    if value.kind != kind or value.value <= 0:
        example = "24GB" if kind == "size" else "1000h"
        raise UserError(f"{name} must be a {kind} above 0, such as {example}, not {value}")
    return value.value


def read_machines(texts: Sequence[str]) -> tuple[Machines, ...]:
    """Read all `--at`.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    if not texts:
        raise UserError(f'{FLAG} is missing: describe the machines, such as {FLAG} "workers=64, link=1gbit"')
    return tuple(machines for text in texts for machines in read_at(text))


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
    if not file.exists():
        return {}
    from echelon.config.yaml_file import plain, read_yaml

    node = read_yaml(file)
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
