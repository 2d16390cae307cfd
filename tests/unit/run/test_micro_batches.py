"""When memory is short, micro-batches become smaller once for all that died of the same, down to one sample."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from echelon.config import build, load_run_config, to_yaml
from echelon.core.errors import UserError
from echelon.launch.supervisor import Remedy
from echelon.records.events import MoreMicroBatches
from echelon.records.file import Recorder, newest
from echelon.run import fit_memory
from echelon.run.fit_memory import fewest, free_bytes
from echelon.run.micro_batches import Halving, check_micro_batches
from echelon.run.resolve import launch_request, resolve
from echelon.run.start import with_open_batch


def test_all_that_ran_out_with_the_same_micro_batches_halve_them_once(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(build(None, {"training.on_oom": "halve", "training.accumulate": 2}).config))
    with closing(Recorder(tmp_path)) as record:
        halving = Halving(tmp_path, 6, record)
        halving.begin("worker0")
        halving.begin("worker1")
        assert [halving.ease(name) for name in ("worker0", "worker1")] == [Remedy("4 micro-batches")] * 2
        assert load_run_config(file).training.accumulate == 4
        halving.begin("worker1")
        assert halving.ease("worker1") == Remedy("6 micro-batches")
        halving.begin("worker1")
        assert "one sample already" in halving.ease("worker1").hopeless
    assert [event.micro_batches for event in newest(tmp_path, MoreMicroBatches)] == [6, 4]
    assert load_run_config(file).training.on_oom == "halve"


@pytest.mark.parametrize("setting", [{"training.on_oom": "halve"}, {"training.accumulate": "auto"}])
@pytest.mark.parametrize(
    "place", [{"launch.nodes": "2", "launch.rendezvous": "10.0.0.1:29400"}, {"strategy.parallel": "pp=2"}]
)
def test_a_choice_of_micro_batches_is_refused_where_ranks_could_not_agree(
    setting: dict[str, str], place: dict[str, str]
) -> None:
    run = resolve(build(None, setting | place).config)
    with pytest.raises(UserError, match=r"halve|auto"):
        check_micro_batches(run, 2)


def test_the_fewest_micro_batches_that_fit_are_chosen_and_none_that_does_is_refused() -> None:
    assert [fewest(lambda count: 1000 // count, 6, free) for free in (1000, 600, 200)] == [1, 2, 6]
    with pytest.raises(UserError, match="--accumulate auto: a rank is forecast to need 166 B with one sample"):
        fewest(lambda count: 1000 // count, 6, 100)


@pytest.mark.long
def test_what_is_chosen_fits_what_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"training.accumulate": "auto", "data.batch_size": 1024, "training.device": "cpu"}
    monkeypatch.setattr(fit_memory, "free_bytes", lambda device, ranks: 10_000_000)
    config = fit_memory.chosen(resolve(build(None, given).config), 1, None)
    assert 1 < config.training.accumulate < 1024
    monkeypatch.setattr(fit_memory, "free_bytes", lambda device, ranks: 10_000_000)
    given = {"data.batch_size": "auto", "model.name": "mlp", "training.device": "cpu", "launch.workers": 2}
    chosen = with_open_batch(launch_request(build(None, given).config)).config
    assert chosen.data.batch_size == 16 and "the learning rate stays 0.1" in capsys.readouterr().err
    free = free_bytes(torch.device("cpu"), 1)
    assert 0 <= free_bytes(torch.device("cpu"), 2) < free < psutil.virtual_memory().total
