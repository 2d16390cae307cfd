"""From what a user asks of a flow to its start, or to words about what would start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon.core.errors import UserError
from echelon.flows.base import Flow, StepResources, step_folder
from echelon.flows.chained import chained_texts, run_chained
from echelon.flows.child import hashes_of, is_done
from echelon.flows.driver import FlowOutcome, Say, check_resources, machine_resources, run_flow
from echelon.flows.fingerprint import fingerprint
from echelon.flows.named import check_named
from echelon.flows.resolve import memory_given, read_flow
from echelon.flows.state import (
    GIVEN_FILE,
    FlowArguments,
    completed_end,
    load_arguments,
    load_flow,
    only_driver,
    write_arguments,
    write_description,
)
from echelon.launch.places import PlaceChoice
from echelon.launch.places.cluster import TakesChains
from echelon.records.file import newest
from echelon.records.going import LOCK_FILE
from echelon.records.kinds import FlowStepStart

FLOWS_FOLDER = Path("flows")


@dataclass(frozen=True)
class FlowRequest:
    """What a user asks.

    Attributes:
        file: the description; with `resume` the folder of a flow.
        on: where steps run; empty: on this machine, with `resume` where they did before.
        run: the flow's folder; empty: `flows/NAME`.
        parameters: values in place of the file's.
        cores, memory, gpus: what steps that go at a time may need together; 0, empty and -1: all of the machine.
        hash_content: know data by its bytes.
    """

    file: str
    on: str = ""
    run: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    memory: str = ""
    gpus: int = -1
    resume: bool = False
    hash_content: bool = False


def start_flow(request: FlowRequest, say: Say) -> FlowOutcome:
    """Begin or continue a flow; returns how it ended.

    Raises:
        UserError: it cannot be; nothing was started then.
    """
    flow, folder = _requested(request)
    on = _place_name(request, folder)
    place, there = _chains(on), _resources(request)
    check_named(flow, here=place is None)
    if place is None:
        check_resources(flow, there)
    with only_driver(folder):
        if request.resume:
            write_arguments(folder, replace(load_arguments(folder), on=on))
        else:
            file = str(Path(request.file).resolve())
            arguments = FlowArguments(file, dict(request.parameters), request.hash_content, on)
            write_description(folder, Path(request.file), arguments)
    if place is not None:
        return run_chained(flow, folder, place, say)
    return run_flow(flow, folder, there, say)


def plan_flow(request: FlowRequest) -> Iterator[str]:
    """Yield a line for each step: kept, or why it would run; then what its place would be given.

    Raises:
        UserError: it cannot be.
    """
    flow, folder = _requested(request)
    place = _chains(_place_name(request, folder))
    check_named(flow, here=place is None)
    if place is None:
        check_resources(flow, _resources(request))
    runs: set[str] = set()
    for name in flow.sorter().static_order():
        step = flow.steps[name]
        because = [before for before in step.before if before in runs]
        if because:
            runs.add(name)
            yield f"{name}: would run after {', '.join(because)}, unless these leave what they left before"
            continue
        now = fingerprint(flow, step, lambda before: hashes_of(folder, before))
        if is_done(flow, folder, step, now):
            yield f"{name}: kept"
            continue
        runs.add(name)
        where = step_folder(folder, name)
        before = next(iter(newest(where, FlowStepStart)), None) if where.is_dir() else None
        changed = now.changed(before.parts) if before is not None else []
        why = f", for its {' and '.join(changed)} changed" * bool(changed)
        if not changed and completed_end(where) is not None:
            why = ", for its outputs are damaged"
        yield f"{name}: would run{why}"
    if place is not None:
        yield from ("", *(text.rstrip() for text in chained_texts(flow, folder, place)))


def _requested(request: FlowRequest) -> tuple[Flow, Path]:
    """Return the flow, and its folder.

    Raises:
        UserError: there is no such flow, or it cannot be.
    """
    path = Path(request.file)
    if request.resume:
        if request.parameters or request.run or request.hash_content:
            raise UserError("--resume continues a flow as it was: leave out --set, --run and --hash-content")
        return load_flow(path), path
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the flow's file, or continue with --resume {path}")
    flow = read_flow(path, request.parameters, request.hash_content)
    folder = Path(request.run) if request.run else FLOWS_FOLDER / flow.name
    others = [entry for entry in folder.iterdir() if entry.name != LOCK_FILE] if folder.exists() else []
    if others and not (folder / GIVEN_FILE).exists():
        raise UserError(f"{folder} holds something else than a flow: choose another folder with --run")
    if others and not request.run:
        owner = Path(load_arguments(folder).file)
        if owner != path.resolve() and owner.exists():  # else it was moved
            raise UserError(
                f"{folder} is the folder of {owner}, whose results would be replaced: choose another folder with "
                f"--run, give this flow another name (`name: ...`), or go on there with --run {folder}"
            )
    return flow, folder


def _place_name(request: FlowRequest, folder: Path) -> str:
    return request.on or (load_arguments(folder).on if request.resume else "local")


def queue_of(folder: Path) -> TakesChains | None:
    """Return the place that has a flow's steps as jobs; None: they run on this machine.

    Raises:
        UserError: there is no such flow.
    """
    return _chains(load_arguments(folder).on)


def _chains(on: str) -> TakesChains | None:
    """Return the place that queues a flow's steps; None: they run on this machine.

    Raises:
        UserError: there is no such place, or it can do neither.
    """
    choice = PlaceChoice(on)
    place = choice.cluster()
    if isinstance(place, TakesChains):
        return place
    if place is not None or not choice.runs_here:
        raise UserError(f"--on {on}: this place does not take steps of a flow; a step's settings may have `on:`")
    return None


def _resources(request: FlowRequest) -> StepResources:
    there = machine_resources()
    if request.cores:
        there = replace(there, cores=request.cores)
    if request.memory:
        there = replace(there, memory_bytes=memory_given(request.memory))
    return there if request.gpus < 0 else replace(there, gpus=request.gpus)
