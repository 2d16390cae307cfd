"""Machines as `--at` describes them (workers, speed, links, price), and places by names of the user's own file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.core.errors import UserError, naming, unknown
from echelon.core.link import Link, parse_link
from echelon.core.spec import Quantity, Spec, bind, parse_spec, show_value

FLAG = "--at"
_USED_SHARE = 0.9  # of a device's memory
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
        price: of a worker for an hour, in whatever currency; 0: it is free.
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
    price: float | None = None
    mtbf: Quantity | None = None


@dataclass(frozen=True)
class Machines:
    """Machines and the links of each worker: all alike, or groups that are each alike.

    Of groups, speed and memory are those of the slowest and smallest worker, links the slowest of their kind; their
    workers' sharing of processors is in that speed.

    Attributes:
        name: as they were described.
        link: between machines; None: as measured.
        inside: between workers of one machine; None: as measured.
        processors: as in `MachineWords`; of groups 0.
        memory_bytes: of a worker; infinite: not said.
        speed: of a worker, in those that were measured.
        tflops: as in `MachineWords`; 0: the speed is measured.
        price_per_hour: of all workers; None: not said.
        mtbf_s: of one machine; infinite: none fails.
        groups: of workers that are alike; empty: all are.
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
    price_per_hour: float | None = None
    mtbf_s: float = math.inf
    groups: tuple[Machines, ...] = ()

    @property
    def count(self) -> int:
        """Machines."""
        return sum(group.count for group in self.groups) or -(-self.workers // self.per_machine)

    @property
    def parts(self) -> tuple[Machines, ...]:
        """The groups; of machines that are all alike these themselves."""
        return self.groups or (self,)

    @property
    def usable_bytes(self) -> float:
        """What a worker's memory may be forecast to take: a forecast is no measurement."""
        return _USED_SHARE * self.memory_bytes

    @property
    def are_alike(self) -> bool:
        """Whether all workers are as fast."""
        return len({group.busy_speed for group in self.parts}) == 1

    @property
    def mean_speed(self) -> float:
        """The mean of all workers, while all compute."""
        return sum(group.busy_speed * group.workers for group in self.parts) / self.workers

    @property
    def slowest(self) -> float:
        """The speed at which messages are handled while all compute: a chain of them goes through every worker."""
        return min(machines.busy_speed for machines in (self, *self.groups))

    def times_as_fast(self, factor: float) -> Machines:
        """Return them with workers of so many times the speed."""
        groups = tuple(group.times_as_fast(factor) for group in self.groups)
        return replace(self, speed=self.speed * factor, groups=groups)

    @property
    def busy_speed(self) -> float:
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
    if not isinstance(rows, list) or not _are_rows(rows):
        raise UserError(f"{path} must be a list of machines, each such as: {{workers: 8, link: 1gbit, price: 2}}")
    with naming(path.name):
        return [_from_row(row) for row in rows]


def _are_rows(rows: Sequence[object]) -> bool:
    return bool(rows) and all(isinstance(row, dict) for row in rows)


def _from_row(row: Mapping[str, object]) -> Machines:
    """Read machines that are alike, or groups of such with the link between them, and a name for either."""
    words = {str(key): value for key, value in row.items()}
    name = str(words.pop("name", ""))
    if "groups" not in words:
        with naming(name):
            machines = _checked(_words_of(words))
        return replace(machines, name=name or machines.name)
    groups = words.pop("groups")
    if not isinstance(groups, list) or not _are_rows(groups):
        raise UserError(
            "groups must be a list of one or more, each such as: {workers: 4, speed: 2, inside: 100gbit, price: 2}"
        )
    if strange := sorted(set(words) - {"between"}):
        raise UserError(
            f"{strange[0]} belongs into the groups: beside them stand name and between (the link between groups)"
        )
    between = words.get("between", "loopback")
    with naming("groups"):
        read = tuple(_group(group, number) for number, group in enumerate(groups, 1))
        return _together(read, _link("between", str(between)), name)


def _group(row: Mapping[str, object], number: int) -> Machines:
    """Read the group at a place in its list, counted from 1; one without a link is one machine."""
    words = {str(key): value for key, value in row.items()}
    name = str(words.pop("name", ""))
    if "link" not in words and "workers" in words:
        words.setdefault("per_machine", words["workers"])
    with naming(f"group {name or number}"):
        machines = _checked(_words_of(words))
    return replace(machines, name=name or machines.name)


def _words_of(row: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={_word(value)}" for key, value in row.items())


def _together(groups: tuple[Machines, ...], between: Link | None, name: str) -> Machines:
    """Return groups as one description: what all of them do together goes at the pace of the slowest of each kind.

    Raises:
        UserError: some have a price, or a rate in place of a speed, and others none.
    """
    rated = [group for group in groups if group.tflops]
    priced = [group.price_per_hour for group in groups if group.price_per_hour is not None]
    for given, word in ((rated, "tflops"), (priced, "price")):
        if given and len(given) < len(groups):
            raise UserError(f"{word} is said of some groups: say it of all of them, or of none")
    fastest = max(group.tflops for group in groups)
    if rated:  # the fastest's rate is what is planned from
        groups = tuple(replace(group, speed=group.tflops / fastest) for group in groups)
    failures = sum(group.count / group.mtbf_s for group in groups)
    several = len(groups) > 1
    return Machines(
        name=name or " and ".join(f"({group.name})" for group in groups),
        workers=sum(group.workers for group in groups),
        per_machine=math.gcd(*(group.per_machine for group in groups)),
        link=_slowest([*([between] if several else []), *(g.link for g in groups if g.count > 1)]),
        inside=_slowest(group.inside for group in groups),
        memory_bytes=min(group.memory_bytes for group in groups),
        speed=min(group.busy_speed for group in groups),
        tflops=fastest,
        price_per_hour=sum(priced) if priced else None,
        mtbf_s=sum(group.count for group in groups) / failures if failures else math.inf,
        groups=groups,
    )


def _slowest(links: Iterable[Link | None]) -> Link | None:
    """Return a link with the least rate and the longest delay of some; None: none is described."""
    told = [link for link in links if link is not None]
    if not told:
        return None
    return Link(min(link.rate_bits_per_s for link in told), max(link.delay_s for link in told))


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
        price_per_hour=None if described.price is None else described.price * described.workers,
        mtbf_s=_quantity("mtbf", described.mtbf, "duration"),
    )


def _check_positive(described: MachineWords) -> None:
    for name in ("workers", "per_machine", "speed"):
        if getattr(described, name) <= 0:
            raise UserError(f"{name} must be above 0, not {getattr(described, name)}")
    for name in ("processors", "tflops", "price"):
        if (getattr(described, name) or 0) < 0:
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
