"""Structured logs without a word of any request.

Log calls pass facts as ``extra={"facts": {...}}``; one formatter writes JSON lines, the
other text. Tracebacks are cut down to file, line and function, because the message of a
foreign exception may quote what it choked on.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import Any, Literal, get_args

LogFormat = Literal["json", "text"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
_MAX_VALUE_CHARS = 500


def set_up_logging(log_format: LogFormat, level: int = logging.INFO) -> None:
    """Send the ``kvgate`` loggers to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logger = logging.getLogger("kvgate")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def where(error: BaseException) -> str:
    """Type of an error and the lines it passed, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames[::-1])
    return f"{type(error).__name__} at {lines}"


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = dict(getattr(record, "facts", {}))
    if record.exc_info and record.exc_info[1] is not None:
        facts["error"] = where(record.exc_info[1])
    return {name: _clean(value) for name, value in facts.items()}


def _clean(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return "".join(c if c.isprintable() else "?" for c in value[:_MAX_VALUE_CHARS])


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _clean(record.getMessage()),
            **_facts(record),
        }
        return json.dumps(line, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in _facts(record).items())
        return f"{record.levelname.lower():<7} {_clean(record.getMessage())}{facts}"
