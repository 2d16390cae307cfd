"""The node command: `python -m echelon.run.node RUN`, started by a place once on each of its machines.

It takes its rank from what the place says in the environment, meets the other machines, and runs this machine's part of
the run as the same command by hand would. Exit code 0: the run ended here in an orderly way, and the first machine has
noted how (`PlaceFiles.exit`), except where the place goes by exit codes, which are then those of the command by hand;
2: refused, which is noted by whoever refused; anything else: this machine's part died.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from echelon.config import RunConfig, load_run_config
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.output import outlive_readers
from echelon.core.stop import Stopped, stop_at_once, stopped_exit_code
from echelon.core.units import format_seconds
from echelon.launch.places.cluster import Cluster, NodeRank, PlaceFiles
from echelon.records.file import newest
from echelon.records.kinds import Checkpoint
from echelon.run.elsewhere import VERSIONS_FILE
from echelon.run.home import refresh
from echelon.run.machine import say
from echelon.run.notify import Notifier
from echelon.run.resolve import place_of
from echelon.run.versions import versions
from echelon.trainer.folder import CONFIG_FILE

MOST_IN_VAIN = 10  # starts without a new checkpoint: such a run would never end
_LOOK_S = 0.1


def main(run: Path) -> int:
    """Run this machine's part of a run; returns the exit code."""
    outlive_readers()
    stop_at_once()
    files, node_rank, config, cluster = PlaceFiles(run), None, None, None
    try:
        config = load_run_config(run / CONFIG_FILE)
        cluster = place_of(config).cluster()
        if cluster is None:
            raise UserError(f"{run} is no run of a cluster's: --on {config.launch.on}")
        node_rank = cluster.node_rank(os.environ)
        _check_versions(files, node_rank)
        if node_rank.number == 0:
            if files.home and not cluster.shares_disk:  # else who handed it over has brought it
                refresh(files.home, run)
            _check_progress(run, files)
        code, reason = (0, "") if _is_over(files, node_rank) else _run_part(run, config, cluster, node_rank)
    except (Stopped, KeyboardInterrupt) as stop:  # before anything was there to save
        code = stopped_exit_code(stop.signum if isinstance(stop, Stopped) else 0)
        reason = "it was stopped before it began"
    except UserError as error:
        if node_rank is not None and _is_over(files, node_rank):  # while it waited for the first machine
            return 0
        say(str(error))
        if config is not None:
            Notifier(config.tracking.notify, run).end("refused", str(error))
        files.end(USER_ERROR_EXIT_CODE, str(error))
        return USER_ERROR_EXIT_CODE
    refused = (files.ended() or (0, ""))[0] == USER_ERROR_EXIT_CODE  # by another machine, for which this one was ended
    if (node_rank is None or node_rank.number == 0) and not refused:
        files.end(code, reason)
    return code if cluster is not None and cluster.exit_codes_decide else 0


def _is_over(files: PlaceFiles, node_rank: NodeRank) -> bool:
    """Whether the first machine has completed the run, without this one; which is said."""
    if node_rank.number == 0 or (files.ended() or (1, ""))[0] != 0:
        return False
    say("the run has been completed by the other machines")
    return True


def _run_part(run: Path, config: RunConfig, cluster: Cluster, node_rank: NodeRank) -> tuple[int, str]:
    """Return the exit code that a command by hand would have, and why, where the run's record cannot say it."""
    from echelon.run.resolve import resolve
    from echelon.run.start import start_again

    machines, rendezvous = node_rank.machines or cluster.machines, ""
    if machines > 1:
        rendezvous = _rendezvous(PlaceFiles(run), node_rank, resolve(config).timeout_s)
    # alone, too: an earlier start, of which the folder tells, may have been one of several machines
    config = replace(config, launch=replace(config.launch, nodes=str(machines), rendezvous=rendezvous))
    outcome = start_again(run, config, node_rank=node_rank)
    return outcome.exit_code, outcome.failure


def _rendezvous(files: PlaceFiles, node_rank: NodeRank, deadline_s: float) -> str:
    """Return where the machines of this start meet: the first one chooses a free port, and tells the others.

    Raises:
        UserError: it was not told in time.
    """
    if address := files.meeting(node_rank):  # its place chose it
        return address
    if node_rank.number == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{node_rank.address}:{free.getsockname()[1]}"
        files.meet_at(node_rank, address)
        return address
    ends = time.monotonic() + deadline_s
    while not (address := files.meeting(node_rank)):
        if time.monotonic() > ends:
            waited = format_seconds(deadline_s)
            raise UserError(
                f"the first machine did not say where it is within {waited}: is {files.folder} common to all?"
            )
        time.sleep(_LOOK_S)
    return address


def _check_versions(files: PlaceFiles, node_rank: NodeRank) -> None:
    """Refuse other versions than those of the machine that submitted the run.

    Raises:
        UserError: names the first that differs.
    """
    wanted = json.loads((files.folder / VERSIONS_FILE).read_text())
    for name, here in versions().items():
        if wanted[name] != here:
            raise UserError(
                f"{node_rank.name} has {name} {here}, the run was submitted with {wanted[name]}: use the same"
            )


def _check_progress(run: Path, files: PlaceFiles) -> None:
    """Refuse to go on where start after start brought no new checkpoint.

    Raises:
        UserError: says what may help.
    """
    last = next(newest(run, Checkpoint), None)
    step = last.step if last is not None else 0
    with files.starts.open("a") as file:
        file.write(f"{step}\n")
    begun_at = files.starts.read_text().split()[-MOST_IN_VAIN - 1 :]
    if len(begun_at) > MOST_IN_VAIN and set(begun_at) == {str(step)}:
        raise UserError(
            f"{MOST_IN_VAIN} starts brought no checkpoint after step {step}: give --on a longer time, or a smaller "
            "--checkpoint-every"
        )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
