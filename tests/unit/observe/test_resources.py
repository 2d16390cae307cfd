"""What a rank samples of itself: processor, memory, network; a GPU's counters where NVML is."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from echelon.observe.resources import EVERY_S, LIST_CHILDREN_EVERY_S, Gpu, Sampler, carrying_interfaces
from echelon.records.kinds import RESOURCE_NAMES, RankResources


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_sample_needs_two_looks_and_comes_not_too_often() -> None:
    clock = Clock()
    sampler = Sampler(clock=clock)
    assert not sampler.sample()
    clock.now += EVERY_S / 2
    assert not sampler.sample()
    clock.now += EVERY_S
    assert sampler.sample() and len(sampler.row) == len(RESOURCE_NAMES)
    now = RankResources(*sampler.row)
    assert now.rss_bytes > 1e6 and 0 <= now.cpu_percent < 100_000 and now.sent_per_s >= 0
    assert math.isnan(now.gpu_percent)
    assert not sampler.sample()


def test_busy_time_is_seen_and_loaders_count() -> None:
    clock = Clock()
    before = Sampler(clock=clock)  # other tests' processes may be this one's children
    before.sample()
    clock.now += EVERY_S
    assert before.sample()
    others = RankResources(*before.row).loaders_rss_bytes
    busy = "x = 0\nwhile x < 4_000_000: x += 1\nprint('done', flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        sampler = Sampler(clock=clock)
        sampler.sample()
        began = psutil.Process(child.pid).cpu_times().user
        child.stdout.readline()
        clock.now += EVERY_S
        assert sampler.sample()
        spent = psutil.Process(child.pid).cpu_times().user - began
        now = RankResources(*sampler.row)
        assert now.loaders_rss_bytes > others + 4e6
        assert now.cpu_percent >= 100 * (spent - 0.02) / EVERY_S > 0
    finally:
        child.communicate()
    clock.now += EVERY_S
    assert sampler.sample()  # a loader that ended is no error
    assert RankResources(*sampler.row).loaders_rss_bytes <= others + 4e6


def test_a_loader_that_is_found_late_counts_from_then_on() -> None:
    clock = Clock()
    sampler = Sampler(clock=clock)
    began_s = time.process_time()
    sampler.sample()
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        clock.now += LIST_CHILDREN_EVERY_S
        assert sampler.sample()
        own_s = time.process_time() - began_s
        seen_s = RankResources(*sampler.row).cpu_percent / 100 * LIST_CHILDREN_EVERY_S
        assert seen_s < own_s + 0.3, "the half second of the loader's life before it was found must not count"
    finally:
        child.communicate()


def test_without_nvml_the_rest_is_sampled_and_the_log_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    sampler = Sampler(gpu="00000000-0000-0000-0000-000000000000", clock=clock)
    with caplog.at_level(logging.WARNING):
        sampler.sample()
        for _ in range(2):
            clock.now += EVERY_S
            assert sampler.sample()
    assert math.isnan(RankResources(*sampler.row).gpu_percent) and RankResources(*sampler.row).rss_bytes > 0
    assert len(caplog.records) == 1 and "NVML has no counters of GPU-0000" in caplog.text


def test_nvml_counters_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML itself is stood in for: it needs a GPU."""

    class NVMLError(Exception): ...

    class NVMLErrorNotSupported(NVMLError): ...

    def no_counter(handle: str) -> object:
        raise NVMLErrorNotSupported

    def lost(handle: str) -> object:
        raise NVMLError

    asked: list[str] = []
    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NVMLErrorNotSupported,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid) or uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=5, total=9),
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=73),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpu = Gpu("11-22")
    assert gpu.read() == (73.0, 5.0, 9.0) and gpu.read()[0] == 73.0 and asked == ["GPU-11-22"]
    nvml.nvmlDeviceGetUtilizationRates = no_counter
    busy, used, _ = gpu.read()
    assert math.isnan(busy) and used == 5.0
    nvml.nvmlDeviceGetUtilizationRates = lost
    with pytest.raises(RuntimeError, match="no counters of GPU-11-22"):
        gpu.read()


def test_bytes_of_bonds_bridges_and_vlans_are_counted_once(tmp_path: Path) -> None:
    for name in ("eth0", "eth1", "bond0", "bond0.100", "br0", "veth7"):
        (tmp_path / name).mkdir()
    for name, below in (("bond0", "eth0"), ("bond0", "eth1"), ("bond0.100", "bond0"), ("br0", "veth7")):
        (tmp_path / name / f"lower_{below}").touch()
    (tmp_path / "veth7" / "master").touch()
    names = ["eth0", "eth1", "bond0", "bond0.100", "br0", "veth7"]
    assert carrying_interfaces(names, tmp_path) == ["eth0", "eth1"]
    (tmp_path / "wg0").mkdir()
    (tmp_path / "wg0" / "uevent").write_text("DEVTYPE=wireguard\nINTERFACE=wg0\n")
    assert carrying_interfaces(["eth0", "wg0"], tmp_path) == ["eth0"]
    assert carrying_interfaces(["veth7"], tmp_path) == ["veth7"]
    (tmp_path / "eth1" / "device").touch()
    assert carrying_interfaces(["eth0", "eth1"], tmp_path) == ["eth0", "eth1"], "a pod's network beside a device"
    assert carrying_interfaces(["en0"], tmp_path / "none") == ["en0"]
