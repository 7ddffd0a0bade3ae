"""The pages that operators read say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.errors import REFUSALS
from extproc.reference import metrics_reference, policy_reference

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("page", "written"), [("policy.md", policy_reference), ("metrics.md", metrics_reference)]
)
def test_a_reference_page_is_what_make_docs_writes(page: str, written: object) -> None:
    assert callable(written)
    assert (ROOT / "docs" / page).read_text() == written(), "run make docs"


def test_every_policy_field_is_explained() -> None:
    rows = [line for line in policy_reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize("refusal", REFUSALS)
def test_the_readme_lists_every_refusal(refusal: type) -> None:
    code, status = refusal.code, refusal.http_status  # type: ignore[attr-defined]
    retry = "yes" if refusal.retryable else "no"  # type: ignore[attr-defined]
    assert f"| `{code}` | {status} | {retry} |" in (ROOT / "README.md").read_text()
