"""Runs that live in a real object store, on a real Slurm and a real Ray, with data there too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import ray, slurm
from tests.clusters.at_url import check_run_at_a_url
from tests.clusters.stores import binary, seaweedfs
from tests.ranks.runs import Run, Runs

pytest.importorskip("s3fs", reason="s3fs is not installed: uv sync --group clusters")
pytestmark = [
    pytest.mark.skipif(binary("weed") is None, reason="weed is not installed: uv sync --group clusters"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a store; its credentials are in the environment, of clusters that start later too."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")):
        yield


@pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "there is one")
def test_slurm(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with slurm.slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster, Runs(tmp_path) as runs:

        def queue_again(run: Run) -> None:
            """End the run's job as its time limit does."""
            job = (run.folder / "place" / "jobs").read_text().split()[-1]
            cluster.ask("scancel", "--batch", "--signal=TERM", job)

        check_run_at_a_url(runs, "slurm(nodes=2, time=1h)", cluster.environment, queue_again)


@pytest.mark.skipif(bool(ray.missing()), reason=ray.missing() or "there is one")
def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # room for names of sockets
    with short as folder, ray.ray_cluster(Path(folder)) as cluster, Runs(tmp_path) as runs:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of the user alone
        place = f'ray(nodes=2, address="{cluster.dashboard}")'
        check_run_at_a_url(runs, place, {}, lambda run: None)
