from __future__ import annotations

import json
from pathlib import Path

from benchmarks.queue_costs import main


def test_a_tiny_run_measures_every_case(tmp_path: Path) -> None:
    output = tmp_path / "queue.json"
    main(seed=1, queued=900, output=output)
    result = json.loads(output.read_text())
    assert [case["tenants"] for case in result["cases"]] == [1, 100, 900] * 2
    for case in result["cases"]:
        assert min(case[name] for name in ("admit_ms", "next_ms", "leave_ms", "bytes")) > 0
