from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InferenceRequest(_message.Message):
    __slots__ = ("path", "headers", "metadata", "body", "prompt")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _struct_pb2.Struct
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    path: str
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    metadata: _containers.MessageMap[str, _struct_pb2.Struct]
    body: bytes
    prompt: Prompt
    def __init__(self, path: _Optional[str] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., metadata: _Optional[_Mapping[str, _struct_pb2.Struct]] = ..., body: _Optional[bytes] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("key", "value", "raw_value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    RAW_VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    raw_value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., raw_value: _Optional[bytes] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("model", "text", "tokens", "max_output_tokens", "cache_salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    tokens: TokenIds
    max_output_tokens: int
    cache_salt: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., max_output_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("admitted", "refusal", "estimate")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    refusal: Refusal
    estimate: Estimate
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., estimate: _Optional[_Union[Estimate, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("lease", "endpoints", "cached_tokens", "prompt_tokens", "queue_wait_s", "lane", "degraded", "max_output_tokens", "model", "cache_salt", "priority", "prefiller")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFILLER_FIELD_NUMBER: _ClassVar[int]
    lease: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    cached_tokens: int
    prompt_tokens: int
    queue_wait_s: float
    lane: str
    degraded: _containers.RepeatedScalarFieldContainer[str]
    max_output_tokens: int
    model: str
    cache_salt: str
    priority: int
    prefiller: str
    def __init__(self, lease: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ..., cached_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., queue_wait_s: _Optional[float] = ..., lane: _Optional[str] = ..., degraded: _Optional[_Iterable[str]] = ..., max_output_tokens: _Optional[int] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., prefiller: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "http_status", "message", "type", "param", "reason", "retryable", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    HTTP_STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    http_status: int
    message: str
    type: str
    param: str
    reason: str
    retryable: bool
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., http_status: _Optional[int] = ..., message: _Optional[str] = ..., type: _Optional[str] = ..., param: _Optional[str] = ..., reason: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SelectWorkerResponse(_message.Message):
    __slots__ = ("selected", "refusal")
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    selected: Selected
    refusal: Refusal
    def __init__(self, selected: _Optional[_Union[Selected, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Selected(_message.Message):
    __slots__ = ("endpoints", "cached_tokens", "prompt_tokens", "cache_salt")
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    cached_tokens: int
    prompt_tokens: int
    cache_salt: str
    def __init__(self, endpoints: _Optional[_Iterable[str]] = ..., cached_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("status", "endpoint", "ttft_s", "prompt_tokens", "output_tokens", "cached_tokens")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    status: int
    endpoint: str
    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, status: _Optional[int] = ..., endpoint: _Optional[str] = ..., ttft_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease", "progress")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    progress: Progress
    def __init__(self, lease: _Optional[str] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease", "progress")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    progress: Progress
    def __init__(self, lease: _Optional[str] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bool
    def __init__(self, held: _Optional[bool] = ...) -> None: ...

class EstimateResponse(_message.Message):
    __slots__ = ("estimate", "refusal")
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    estimate: Estimate
    refusal: Refusal
    def __init__(self, estimate: _Optional[_Union[Estimate, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("verdict", "reason", "expected_wait_s", "retry_after_s", "pool", "lane", "tenant", "prompt_tokens", "cached_tokens", "uncached_tokens", "output_tokens", "workers", "prefiller")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREFILLER_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    reason: str
    expected_wait_s: float
    retry_after_s: float
    pool: str
    lane: str
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    uncached_tokens: int
    output_tokens: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCost]
    prefiller: str
    def __init__(self, verdict: _Optional[str] = ..., reason: _Optional[str] = ..., expected_wait_s: _Optional[float] = ..., retry_after_s: _Optional[float] = ..., pool: _Optional[str] = ..., lane: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerCost, _Mapping]]] = ..., prefiller: _Optional[str] = ...) -> None: ...

class WorkerCost(_message.Message):
    __slots__ = ("address", "cost", "terms", "ready", "has_slot")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HAS_SLOT_FIELD_NUMBER: _ClassVar[int]
    address: str
    cost: float
    terms: _containers.ScalarMap[str, float]
    ready: bool
    has_slot: bool
    def __init__(self, address: _Optional[str] = ..., cost: _Optional[float] = ..., terms: _Optional[_Mapping[str, float]] = ..., ready: _Optional[bool] = ..., has_slot: _Optional[bool] = ...) -> None: ...
