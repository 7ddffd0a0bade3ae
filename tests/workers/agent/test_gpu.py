from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from workers.agent.gpu import GpuUse, NoGpu, NvmlGpu, find_gpu


class NvmlError(Exception):
    pass


class FakeNvml:
    """Stands for ``pynvml`` with two GPUs."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.driver = True
        self.utilisation = [90, 50]
        self.failing: set[str] = set()

    def nvmlInit(self) -> None:  # noqa: N802 - the library's name
        self._check("init")
        if not self.driver:
            raise NvmlError("no driver")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.utilisation)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.utilisation):
            raise NvmlError("no such GPU")
        return index

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:  # noqa: N802
        self._check("utilisation")
        return SimpleNamespace(gpu=self.utilisation[gpu], memory=1)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:  # noqa: N802
        self._check("memory")
        return SimpleNamespace(total=100 + 200 * gpu, used=100, free=0)

    def _check(self, what: str) -> None:
        if what in self.failing:
            raise NvmlError(what)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "fake_nvml", fake)
    return fake


def test_several_gpus_are_one_number_each(nvml: FakeNvml) -> None:
    assert find_gpu(module="fake_nvml").read() == GpuUse(0.7, 0.5)


def test_only_the_workers_own_gpus_count(nvml: FakeNvml) -> None:
    assert NvmlGpu(nvml, (1,)).read() == GpuUse(0.5, pytest.approx(1 / 3))


def test_what_the_driver_does_not_say_is_unknown(nvml: FakeNvml) -> None:
    nvml.failing = {"utilisation"}
    gpu = NvmlGpu(nvml)
    assert gpu.read() == GpuUse(None, 0.5)
    nvml.failing = {"memory"}
    assert gpu.read() == GpuUse(0.7, None)


def test_without_gpus_driver_or_library_nothing_is_known(nvml: FakeNvml) -> None:
    assert find_gpu(module="no_such_nvml").read() is None
    assert isinstance(find_gpu((7,), module="fake_nvml"), NoGpu)
    nvml.utilisation = []
    assert find_gpu(module="fake_nvml").read() is None
    nvml.driver = False
    assert find_gpu(module="fake_nvml").read() is None
