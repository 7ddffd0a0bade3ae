"""Errors in vLLM's shapes: OpenAI's on most routes, Anthropic's on ``/v1/messages``."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class ApiError(Exception):
    """An answer other than 200; the message never quotes the prompt."""

    def __init__(
        self, status: int, message: str, param: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or _TYPES.get(status, "Internal Server Error")

    def body(self) -> dict[str, Any]:
        """vLLM's error body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        """The error body of ``/v1/messages``."""
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


def malformed(message: str, place: str = "") -> ApiError:
    """A body that is not what its endpoint takes; vLLM calls these Bad Request.

    Args:
        place: where in the body, such as ``prompt.0``.
    """
    return ApiError(400, message, f"body.{place}" if place else "body", "Bad Request")


def unknown_model(model: object) -> ApiError:
    """The model is neither the base model nor an adapter."""
    return ApiError(404, f"The model `{model}` does not exist.", "model")


def queue_full() -> ApiError:
    """The limit on queued requests is reached. vLLM sends no Retry-After."""
    return ApiError(
        503,
        "The engine is currently busy and cannot accept new requests. Please try again later.",
    )


def engine_stopped() -> ApiError:
    """The engine went away under the request."""
    return ApiError(500, "EngineCore encountered an issue. See stack trace for the root cause.")
