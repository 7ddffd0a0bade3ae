"""Every way kvgate says no, in one table.

A refusal knows its HTTP status, its stable ``code`` (error body, metric label and
``x-kvgate-refusal`` header carry the same string), OpenAI's error ``type`` and whether
trying again later can help. Messages never quote the request.
"""

from __future__ import annotations

from typing import ClassVar


class KvgateError(Exception):
    """Base of every error that kvgate raises on purpose."""


class PolicyError(KvgateError):
    """The policy file is wrong; the message names the field and the bad value."""


class DigestError(KvgateError):
    """A digest message is malformed or does not fit the pool; no bit of it was used."""


class Refusal(KvgateError):
    """A typed no.

    ``retry_after_s`` is set where waiting that long may help; ``reason`` names what was
    missing, ``quota:<rule>`` or ``capacity:<pool>``, where admission refused.
    """

    http_status: ClassVar[int]
    code: ClassVar[str]
    error_type: ClassVar[str]
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.reason = reason


class BadRequest(Refusal):
    """Base of refusals that are the caller's to mend."""

    http_status = 400
    error_type = "invalid_request_error"


class InvalidJson(BadRequest):
    """The body says it is JSON and is not."""

    code = "invalid_json"


class InvalidRequest(BadRequest):
    """The body is JSON of the wrong shape for its endpoint."""

    code = "invalid_request"


class MissingModel(BadRequest):
    """The body names no model."""

    code = "missing_model"


class UneditableBody(BadRequest):
    """The pool keeps tenants apart, and this body is no plain JSON object that a salt could
    be put into."""

    code = "uneditable_body"


class InvalidIdentity(BadRequest):
    """A header about tenant, lane or times is wrong; ``param`` names it."""

    code = "invalid_identity"


class UnknownTenant(Refusal):
    """The policy serves known tenants only, and this is none."""

    http_status = 401
    code = "unknown_tenant"
    error_type = "invalid_request_error"


class ModelNotFound(Refusal):
    """No pool serves this model."""

    http_status = 404
    code = "model_not_found"
    error_type = "invalid_request_error"


class BodyTooLarge(Refusal):
    """The body is over ``requests.max_body_bytes``."""

    http_status = 413
    code = "body_too_large"
    error_type = "invalid_request_error"


class Contended(Refusal):
    """Base of refusals for load: the same request can succeed later."""

    http_status = 429
    error_type = "rate_limit_error"
    retryable = True


class QuotaTooSmall(Refusal):
    """The request alone is larger than a quota's tokens in flight: it could never run."""

    http_status = 413
    code = "quota_too_small"
    error_type = "rate_limit_error"


class QueueFull(Contended):
    """There is no room to run, and none to wait."""

    code = "queue_full"


class QueueTimeout(Contended):
    """The request waited its whole allowed time."""

    code = "queue_timeout"


class WouldWait(Contended):
    """There is no room to run, and the request said that it does not wait."""

    code = "would_wait"


class DeadlineUnreachable(Contended):
    """The expected wait is longer than the request's deadline or TTFT budget allows."""

    code = "deadline_unreachable"


class Unavailable(Refusal):
    """Base of refusals because the serving side is not there."""

    http_status = 503
    error_type = "service_unavailable_error"
    retryable = True


class NoReadyWorker(Unavailable):
    """The pool exists and none of its workers can serve."""

    code = "no_ready_worker"


class ShuttingDown(Unavailable):
    """This scheduler takes no new requests; another will."""

    code = "shutting_down"


class InternalFault(Refusal):
    """A defect in kvgate; the log has the traceback, the caller gets none of it."""

    http_status = 500
    code = "internal_error"
    error_type = "server_error"


REFUSALS: tuple[type[Refusal], ...] = (
    InvalidJson,
    InvalidRequest,
    MissingModel,
    UneditableBody,
    InvalidIdentity,
    UnknownTenant,
    ModelNotFound,
    BodyTooLarge,
    QuotaTooSmall,
    QueueFull,
    QueueTimeout,
    WouldWait,
    DeadlineUnreachable,
    NoReadyWorker,
    ShuttingDown,
    InternalFault,
)
"""Every concrete refusal, for metrics, docs and the test that enumerates them."""
