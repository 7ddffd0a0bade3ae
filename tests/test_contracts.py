"""Names that two sides spell on their own, because one of them may import nothing of ours."""

from __future__ import annotations

from extproc import envoy_config, replies
from extproc.fleet.worker import EngineError as SchedulerError
from extproc.generated.kvgate.v1 import agent_pb2
from workers import middleware
from workers.engine_errors import EngineError as MiddlewareError


def test_the_error_header_has_one_name() -> None:
    assert middleware.ERROR_HEADER.decode() == replies.ENGINE_ERROR
    assert replies.ENGINE_ERROR == envoy_config.ENGINE_ERROR_HEADER


def test_the_header_that_names_a_prefill_worker_has_one_name() -> None:
    assert replies.PREFILLER == envoy_config.PREFILLER_HEADER


def test_envoy_retries_only_errors_that_the_middleware_knows() -> None:
    known = {str(error.value) for error in MiddlewareError}
    assert set(envoy_config.RETRIED_ENGINE_ERRORS) <= known


def test_every_error_class_of_the_agent_api_has_a_metric_label() -> None:
    names = [name for name in agent_pb2.EngineError.keys() if "UNSPECIFIED" not in name]  # noqa: SIM118
    labels = {error.value for error in SchedulerError}
    assert {name.removeprefix("ENGINE_ERROR_").lower() for name in names} <= labels
