"""A run that lives at a URL, of data at a URL, on a cluster: stopped and resumed there, without the copy here."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace

from echelon.run.home import bring, local_copy
from echelon.storage.url import open_store
from tests.clusters.stores import SECRET
from tests.clusters.test_slurm import check_same
from tests.ranks.runs import SMALL, Run, Runs

ROWS = "a,b,y\n" + "".join(f"{i},{i * i % 7},{i % 3}\n" for i in range(1500))
SETTINGS = (*SMALL, "--target", "y", "--batch-size", "96", "--timeout", "10m", "--eval-every", "0")
FIRST, LAST = "400", "420"


def check_run_at_a_url(runs: Runs, place: str, environment: dict[str, str], interrupt: Callable[[Run], None]) -> None:
    """Train on a place with two machines, and compare with a run of this machine, bit by bit.

    Args:
        environment: of each command; the user's cache is in it.
        interrupt: is given the run once it trains.
    """
    store = f"s3://runs/{uuid.uuid4().hex}"
    url, data = f"{store}/run", f"{store}/t.csv"
    open_store(store).put("t.csv", ROWS.encode())
    given = ("--on", place, "--workers", "1")
    begun = runs.start("train", data, *SETTINGS, *given, "--run", url, "--max-steps", FIRST, environment=environment)
    there = replace(begun, folder=local_copy(url))
    there.wait_for_step(5)
    interrupt(there)
    assert there.end(600) == 0, there.text()
    again = runs.start("train", data, *SETTINGS, *given, "--run", url, environment=environment)
    assert again.end() == 2 and f"continue it with `echelon resume {url}`" in again.errors(), again.text()
    shutil.rmtree(there.folder)
    gone_on = runs.start("resume", url, "--on", place, "--max-steps", LAST, environment=environment)
    assert gone_on.end(600) == 0, gone_on.text()
    here = runs.start("train", data, *SETTINGS, "--workers", "2", "--max-steps", LAST, folder="here")
    assert here.end() == 0, here.text()
    check_same(here, replace(gone_on, folder=bring(url, runs.root / "brought")))
    files = [each for each in runs.root.rglob("*") if each.is_file()]
    assert [each for each in files if SECRET.encode() in each.read_bytes()] == []
