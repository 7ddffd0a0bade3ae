from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.digest_build import Settings, run


@pytest.mark.parametrize("process_seconds", [0, 1])
def test_a_small_run_tells_every_figure(tmp_path: Path, process_seconds: int) -> None:
    output = tmp_path / "digest_build.json"
    settings = Settings(
        blocks=2_000,
        changes_per_s=400,
        seconds=2,
        process_seconds=process_seconds,
        overlay_keys=100,
        output=output,
    )
    run(settings)
    result = json.loads(output.read_text())
    assert result["steps"]["bytes_per_s"] > 0
    assert result["steps"]["cpu_share"] > 0
    assert result["steps"]["keys"] > 1_900
    assert set(result["steps"]["scheduler_ms"]) >= {"delta"}
    assert (result["process"] is not None) is bool(process_seconds)
