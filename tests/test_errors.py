from __future__ import annotations

import pytest

from extproc import errors
from extproc.errors import REFUSALS, BadRequest, Contended, Refusal, Unavailable

_BASES = {BadRequest, Contended, Unavailable}


def _all_below(kind: type[Refusal]) -> set[type[Refusal]]:
    direct = set(kind.__subclasses__())
    return direct.union(*map(_all_below, direct))


def _declared() -> set[type[Refusal]]:
    kinds = _all_below(Refusal)
    return {kind for kind in kinds if kind.__module__ == errors.__name__}


def test_the_table_lists_every_concrete_refusal_once() -> None:
    assert set(REFUSALS) == _declared() - _BASES
    assert len(REFUSALS) == len(set(REFUSALS))


def test_bases_have_no_code_of_their_own() -> None:
    assert not any(hasattr(base, "code") for base in _BASES)


def test_codes_are_distinct_and_fit_for_labels_and_headers() -> None:
    codes = [kind.code for kind in REFUSALS]
    assert len(set(codes)) == len(codes)
    assert all(code.isascii() and code.replace("_", "a").isalpha() for code in codes)


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.code)
def test_a_refusal_keeps_what_it_was_given(kind: type[Refusal]) -> None:
    refusal = kind("Why.", param="model", retry_after_s=2.5)
    assert (str(refusal), refusal.message) == ("Why.", "Why.")
    assert (refusal.param, refusal.retry_after_s) == ("model", 2.5)
    assert (kind("Why.").param, kind("Why.").retry_after_s) == (None, None)


def test_contention_is_429_and_absence_503_and_both_can_be_retried() -> None:
    """429 means that the same request can succeed later, 503 that nobody is there."""
    statuses = {kind.code: (kind.http_status, kind.retryable) for kind in REFUSALS}
    assert statuses == {
        "invalid_json": (400, False),
        "invalid_request": (400, False),
        "missing_model": (400, False),
        "uneditable_body": (400, False),
        "invalid_identity": (400, False),
        "unknown_tenant": (401, False),
        "model_not_found": (404, False),
        "body_too_large": (413, False),
        "quota_too_small": (413, False),
        "queue_full": (429, True),
        "queue_timeout": (429, True),
        "would_wait": (429, True),
        "deadline_unreachable": (429, True),
        "no_ready_worker": (503, True),
        "shutting_down": (503, True),
        "internal_error": (500, False),
    }
