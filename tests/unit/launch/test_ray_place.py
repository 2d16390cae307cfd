"""The Ray place: exactly what is submitted, what is refused, ranks, and a machine without Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.config import build
from echelon.core.errors import UserError
from echelon.launch.places import PLACES, PlaceChoice
from echelon.launch.places.cluster import ChainedJob, NodeRank, PlaceFiles, PlaceSilent, Submission
from echelon.launch.places.ray import RANK_VARIABLE, RayCluster
from echelon.run.elsewhere import check_described

SUBMISSION = Submission(Path("/home/me/runs/digits 1"), Path("/home/me"), "/opt/python")
NO_RAY = """
import sys
sys.modules["ray"] = None
from echelon.cli import command
sys.argv = ["echelon", "train", "digits", "--on", "ray(nodes=2)", "--run", "runs/a"]
command()
"""


def _build(text: str) -> RayCluster:
    place = PLACES.build(text)
    assert isinstance(place, RayCluster)
    return place


def test_the_job_is_as_it_was() -> None:
    assert json.loads(_build("ray(nodes=2, gpus=4, cores=8)").text(SUBMISSION)) == {
        "job": {
            "entrypoint": "/opt/python -m echelon.launch.ray_job '/home/me/runs/digits 1' /home/me",
            "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}},
        },
        "placement_group": {"strategy": "STRICT_SPREAD", "bundles": [{"CPU": 8, "GPU": 4}] * 2},
    }


def test_a_range_of_machines() -> None:
    place = _build("ray(nodes=1:4)")
    assert (place.least_machines, place.machines) == (1, 4)
    group = json.loads(place.text(SUBMISSION))["placement_group"]
    assert group == {"strategy": "STRICT_SPREAD", "bundles": [{"CPU": 1}] * 4, "or_fewer_bundles": 1}
    config = build(None, {"launch.on": "ray(nodes=1:4)", "launch.workers": "1", "strategy.parallel": "dp=4"}).config
    with pytest.raises(UserError, match="dp=4"):
        check_described(config, place)


def test_steps_of_a_flow_are_jobs() -> None:
    job = ChainedJob("tune", Path("tune.sh"), {3: ["python", "it's"]}, True, (), 2, 1e9, 1)
    (step,) = json.loads(_build("ray").chained_text(job))
    assert (step["submission_id"], step["entrypoint"]) == ("tune-3", "python 'it'\"'\"'s'")
    asked = {name: step[f"entrypoint_{name}"] for name in ("num_cpus", "num_gpus", "memory")}
    assert asked == {"num_cpus": 2, "num_gpus": 1, "memory": 1_000_000_000}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ray(nodes=0)", "nodes and cores must be at least 1"),
        ("ray(nodes=0:4)", "nodes and cores must be at least 1"),
        ("ray(nodes=4:1)", "the smaller number comes first"),
        ("ray(gpus=-1)", "gpus at least 0"),
        ("ray(node=2)", "did you mean nodes?"),
        ("rya", "did you mean ray?"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="--on") as refused:
        PlaceChoice(text).cluster()
    assert words in str(refused.value)


def test_a_machine_without_ray(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NO_RAY], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--on ray needs ray: pip install 'echelon[ray]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


def test_a_cluster_that_is_not_reached() -> None:
    pytest.importorskip("ray.job_submission", reason="ray is not installed")
    with pytest.raises(UserError, match="--on ray: "):
        _build('ray(address="http://127.0.0.1:9")').check(SUBMISSION, {})
    with pytest.raises(PlaceSilent):
        _build('ray(address="http://127.0.0.1:9")').state("raysubmit_1")


def test_the_rank_that_the_job_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    node_rank = NodeRank(1, "node 3f2a", "10.0.0.1", "02-0")
    assert _build("ray(nodes=2)").node_rank({RANK_VARIABLE: node_rank.to_json()}) == node_rank
    with pytest.raises(UserError, match="started by echelon"):
        _build("ray(nodes=2)").node_rank({})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="Ray gives 0 GPUs on this node, --on asks for 2"):
        _build("ray(gpus=2)").node_rank({RANK_VARIABLE: node_rank.to_json()})


def test_a_node_command_that_never_begins_is_not_started_for_ever(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from echelon.launch.ray_job import StartsInVain

    (files := PlaceFiles(tmp_path)).prepare()
    vain = StartsInVain(files)
    noted_nothing, lost = -1, -2
    assert not any(vain.add(noted_nothing) for _ in range(9)) and not vain.add(lost)
    assert not any(vain.add(noted_nothing) for _ in range(9))
    files.starts.write_text("0\n")
    assert not vain.add(noted_nothing), "a node command has begun"
    assert not any(vain.add(noted_nothing) for _ in range(9))
    assert "10 starts in a row ended before the run began: logs/node0.out" in vain.add(noted_nothing)
