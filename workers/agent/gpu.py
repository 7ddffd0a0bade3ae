"""How busy the accelerators are, from NVML where there is one (extra ``gpu``).

Without a GPU, driver or ``nvidia-ml-py`` nothing is known, and that is no error. Several
GPUs of one worker: the mean of their busy shares, the share of all their memory.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger("kvgate.agent")


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Shares, 0 to 1; None = the driver does not say."""

    busy: float | None
    memory: float | None


class Gpu(Protocol):
    """Where GPU use comes from."""

    def read(self) -> GpuUse | None:
        """Use as of now; None = unknown."""


class NoGpu:
    """There is nothing to read."""

    def read(self) -> GpuUse | None:
        """Nothing."""
        return None


class NvmlGpu:
    """GPUs of one worker, read by NVML.

    Args:
        nvml: the module ``pynvml``, already initialised.
        indices: NVML's numbers of the worker's GPUs; empty = all that are visible.
    """

    def __init__(self, nvml: Any, indices: Sequence[int] = ()) -> None:
        self._nvml = nvml
        numbers = indices or range(nvml.nvmlDeviceGetCount())
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]

    def read(self) -> GpuUse | None:
        """Use as of now."""
        if not self._handles:
            return None
        return GpuUse(self._busy(), self._memory())

    def _busy(self) -> float | None:
        with contextlib.suppress(self._nvml.NVMLError):
            rates = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._handles]
            return float(min(1.0, sum(rates) / len(rates) / 100))
        return None

    def _memory(self) -> float | None:
        with contextlib.suppress(self._nvml.NVMLError):
            infos = [self._nvml.nvmlDeviceGetMemoryInfo(gpu) for gpu in self._handles]
            total = sum(info.total for info in infos)
            return float(sum(info.used for info in infos) / total) if total else None
        return None


def find_gpu(indices: Sequence[int] = (), module: str = "pynvml") -> Gpu:
    """The worker's GPUs; ``NoGpu`` where there are none."""
    try:
        nvml: Any = importlib.import_module(module)
    except ImportError:
        return NoGpu()
    try:
        nvml.nvmlInit()
        return NvmlGpu(nvml, indices)
    except nvml.NVMLError as error:
        log.info("no GPU to read: %s", error)
        return NoGpu()
