"""A run on pods without a volume: its description travels in a ConfigMap, and the run itself lives at a URL.

Each pod has an empty folder of its own, into which it copies the description. What the run becomes is brought here from
its URL, and what pods print from the cluster.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from echelon.core.errors import USER_ERROR_EXIT_CODE
from echelon.core.files import write_atomic
from echelon.core.stop import stopped_exit_code
from echelon.launch.places.cluster import ANSWER_S, PLACE_FOLDER, PlaceFiles, PlaceSilent
from echelon.launch.places.k8s_client import log_of
from echelon.storage.archive import Archive, DamagedArchive, is_there
from echelon.storage.url import open_store

CONTAINER = "echelon"
_INDEX = "batch.kubernetes.io/job-completion-index"
RUNS = PurePosixPath("/mnt/echelon/runs")
DESCRIBED = PurePosixPath("/mnt/echelon/described")
_IN_RUN, _OF_PLACE = ("config.yaml", "launch.json"), ("home", "versions")
_MEETING = "meeting"
_CHECKPOINTS = "checkpoints/"
_OF_THIS_MACHINE = "file://"
_SAID = "echelon: "


@dataclass(frozen=True)
class PodEnd:
    """How a pod's container ended: its exit code, and the last that it printed."""

    code: int
    words: str


def lacking_home(home: str) -> str:
    """Return why a run would be gone with its pods, and what to give; empty: it lives at a URL that all reach."""
    if home and not home.startswith(_OF_THIS_MACHINE):
        return ""
    return (
        "--on k8s without a volume: the run must live where pods and this machine reach it: give --run URL, such as "
        "s3://BUCKET/runs/NAME; or claim and mount, a volume that all of them see"
    )


def description(files: PlaceFiles, run: Path, meeting: str) -> dict[str, str]:
    """Return what a pod must know of a run, as the data of a ConfigMap.

    Args:
        meeting: the name of the file that says where the first machine answers.
    """
    found = {name: (run / name).read_text() for name in _IN_RUN}
    found |= {name: (files.folder / name).read_text() for name in _OF_PLACE}
    return found | {_MEETING: (files.folder / meeting).read_text()}


def described_volume(name: str, meeting: str) -> dict[str, Any]:
    """Return the volume of a ConfigMap that holds a description, its files below the folders that a run has them in."""
    paths = {key: key for key in _IN_RUN} | {key: f"{PLACE_FOLDER}/{key}" for key in _OF_PLACE}
    paths[_MEETING] = f"{PLACE_FOLDER}/{meeting}"
    items = [{"key": key, "path": path} for key, path in paths.items()]
    return {"name": "described", "configMap": {"name": name, "items": items}}


def shell_text(run: Path, node_command: str) -> str:
    """Return what a pod's shell runs: it makes the run's folder, and becomes the node command."""
    folder, place = shlex.quote(str(RUNS / run.name)), shlex.quote(str(RUNS / run.name / PLACE_FOLDER))
    files = " ".join(str(DESCRIBED / name) for name in _IN_RUN)
    return (
        f"mkdir -p {folder}/logs {place} && cp {files} {folder}/ && cp {DESCRIBED / PLACE_FOLDER}/* {place}/ && "
        f"exec {node_command} {folder}"
    )


def bring_told(url: str, folder: Path) -> None:
    """Bring what the newest version of a run at a URL tells of it: all but its checkpoints.

    How the run was described for this start stays: what lies there may be of the one before.

    Raises:
        PlaceSilent: the store cannot be read now.
    """
    archive = Archive(open_store(url))
    try:
        version = archive.newest()
        for part in version.parts if version is not None else ():
            path = folder / part.name
            stays = part.name in _IN_RUN or part.name.startswith(_CHECKPOINTS)
            if not stays and not is_there(part, path):
                archive.fetch(part, path)
    except (OSError, DamagedArchive) as error:
        raise PlaceSilent(f"{url}: {error}") from error


def note_end(files: PlaceFiles, is_complete: bool, was_stopped: bool, ends: Mapping[int, PodEnd]) -> None:
    """Note how a run ended whose job is over, as its first machine does where its folder is common to all.

    Args:
        ends: of its pods, by their number.
    """
    if is_complete:
        files.end(0)
        return
    if was_stopped:
        files.end(stopped_exit_code(signal.SIGTERM))
        return
    refused = [end for _, end in sorted(ends.items()) if end.code == USER_ERROR_EXIT_CODE]
    failed = refused or [end for _, end in sorted(ends.items()) if end.code]
    files.end(failed[0].code if refused else 1, failed[0].words if failed else "")


def bring_logs(core: Any, namespace: str, job: str, run: Path, first_alone: bool) -> dict[int, PodEnd]:
    """Bring what pods of a job printed; returns how those ended that did, by their number.

    Args:
        core: the client's core API.
        first_alone: of the first pod only.
    """
    found = core.list_namespaced_pod(namespace, label_selector=f"job-name={job}", _request_timeout=ANSWER_S).items
    newest = {int(pod.metadata.annotations[_INDEX]): pod for pod in sorted(found, key=_age)}
    ends = {}
    for number, pod in newest.items():
        states = [each.state for each in pod.status.container_statuses or ()]
        for over in (state.terminated for state in states if state.terminated is not None):
            ends[number] = PodEnd(over.exit_code, last_words(over.message or ""))
        has_begun = any(state.waiting is None for state in states)
        if has_begun and (number == 0 or not first_alone):
            text = log_of(core, namespace, pod.metadata.name, CONTAINER)
            if text is not None:
                _keep_log(run / "logs", number, pod, text)
    return ends


def _keep_log(logs: Path, number: int, pod: Any, text: str) -> None:
    """Keep what a pod has printed, behind what those before it of its number had."""
    name, made = pod.metadata.name, pod.metadata.creation_timestamp
    own = logs / f".node{number}.{made:%Y%m%dT%H%M%S}.{name}"
    if own.exists() and own.read_text(errors="replace") == text:
        return
    write_atomic(own, text)
    parts = [path.read_text(errors="replace") for path in sorted(logs.glob(f".node{number}.*"))]
    write_atomic(logs / f"node{number}.out", "".join(parts))


def _age(pod: Any) -> Any:
    return pod.metadata.creation_timestamp


def last_words(log: str) -> str:
    """Return the last line of what a pod printed, as a reason.

    >>> last_words("step 3\\nechelon: no such data\\n")
    'no such data'
    """
    lines = log.strip().splitlines()
    return lines[-1].removeprefix(_SAID) if lines else ""
