"""The pages that operators read say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.errors import REFUSALS, Refusal
from extproc.reference import metrics_reference, policy_reference, refusals_reference

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("page", "written"),
    [
        ("policy.md", policy_reference),
        ("metrics.md", metrics_reference),
        ("refusals.md", refusals_reference),
    ],
)
def test_a_reference_page_is_what_make_docs_writes(page: str, written: object) -> None:
    assert callable(written)
    assert (ROOT / "docs" / page).read_text() == written(), "run make docs"


def test_every_policy_field_is_explained() -> None:
    rows = [line for line in policy_reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if row.endswith("|  |")] == []


def test_a_default_is_shown_as_it_would_be_written() -> None:
    page = policy_reference()
    assert "| `lane` | `[{header: x-kvgate-lane}]` |" in page
    assert "| `objectives` | none |" in page
    assert "| `response_headers` | `true` |" in page


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_the_page_of_refusals_says_what_a_caller_can_do(refusal: type[Refusal]) -> None:
    (row,) = [line for line in refusals_reference().splitlines() if f"| `{refusal.code}` |" in line]
    _, _, status, kind, retry, headers, meaning, _ = (cell.strip() for cell in row.split("|"))
    assert (status, kind) == (str(refusal.http_status), f"`{refusal.error_type}`")
    assert (retry == "yes") is refusal.retryable
    assert ("`retry-after`, `retry-after-ms`" in headers) is refusal.retryable
    assert ("`x-should-retry: false`" in headers) is not refusal.retryable
    assert meaning.endswith(".")
