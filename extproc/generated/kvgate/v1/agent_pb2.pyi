from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINED: _ClassVar[WorkerState]
    WORKER_STATE_ASLEEP: _ClassVar[WorkerState]
    WORKER_STATE_FROZEN: _ClassVar[WorkerState]
    WORKER_STATE_DOWN: _ClassVar[WorkerState]

class EngineError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ERROR_UNSPECIFIED: _ClassVar[EngineError]
    ENGINE_ERROR_NONE: _ClassVar[EngineError]
    ENGINE_ERROR_CLIENT: _ClassVar[EngineError]
    ENGINE_ERROR_TOO_LONG: _ClassVar[EngineError]
    ENGINE_ERROR_QUEUE_FULL: _ClassVar[EngineError]
    ENGINE_ERROR_KV_EXHAUSTED: _ClassVar[EngineError]
    ENGINE_ERROR_ENGINE_DEAD: _ClassVar[EngineError]
    ENGINE_ERROR_SHUTTING_DOWN: _ClassVar[EngineError]
    ENGINE_ERROR_STREAM: _ClassVar[EngineError]
    ENGINE_ERROR_CLIENT_GONE: _ClassVar[EngineError]
    ENGINE_ERROR_OTHER: _ClassVar[EngineError]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DRAINED: WorkerState
WORKER_STATE_ASLEEP: WorkerState
WORKER_STATE_FROZEN: WorkerState
WORKER_STATE_DOWN: WorkerState
ENGINE_ERROR_UNSPECIFIED: EngineError
ENGINE_ERROR_NONE: EngineError
ENGINE_ERROR_CLIENT: EngineError
ENGINE_ERROR_TOO_LONG: EngineError
ENGINE_ERROR_QUEUE_FULL: EngineError
ENGINE_ERROR_KV_EXHAUSTED: EngineError
ENGINE_ERROR_ENGINE_DEAD: EngineError
ENGINE_ERROR_SHUTTING_DOWN: EngineError
ENGINE_ERROR_STREAM: EngineError
ENGINE_ERROR_CLIENT_GONE: EngineError
ENGINE_ERROR_OTHER: EngineError
TIER_DEVICE: Tier
TIER_HOST: Tier

class AgentMessage(_message.Message):
    __slots__ = ("hello", "load", "snapshot", "delta", "finished", "hot")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HOT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    load: Load
    snapshot: DigestSnapshot
    delta: DigestDelta
    finished: Finished
    hot: HotPrefixes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., snapshot: _Optional[_Union[DigestSnapshot, _Mapping]] = ..., delta: _Optional[_Union[DigestDelta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., hot: _Optional[_Union[HotPrefixes, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("address", "models", "max_running", "agent_version", "kv_events", "engine", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    address: str
    models: _containers.RepeatedScalarFieldContainer[str]
    max_running: int
    agent_version: str
    kv_events: bool
    engine: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, address: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., max_running: _Optional[int] = ..., agent_version: _Optional[str] = ..., kv_events: _Optional[bool] = ..., engine: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("ready", "running", "waiting", "kv_usage", "age_s", "kv_blocks", "state", "signals", "adapters", "max_adapters", "in_flight_leases", "leases_known", "left_out", "lost_events")
    class LeftOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    READY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASES_KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LOST_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    running: float
    waiting: float
    kv_usage: float
    age_s: float
    kv_blocks: int
    state: WorkerState
    signals: Signals
    adapters: _containers.RepeatedScalarFieldContainer[str]
    max_adapters: int
    in_flight_leases: _containers.RepeatedScalarFieldContainer[str]
    leases_known: bool
    left_out: _containers.ScalarMap[str, int]
    lost_events: int
    def __init__(self, ready: _Optional[bool] = ..., running: _Optional[float] = ..., waiting: _Optional[float] = ..., kv_usage: _Optional[float] = ..., age_s: _Optional[float] = ..., kv_blocks: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., signals: _Optional[_Union[Signals, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ..., max_adapters: _Optional[int] = ..., in_flight_leases: _Optional[_Iterable[str]] = ..., leases_known: _Optional[bool] = ..., left_out: _Optional[_Mapping[str, int]] = ..., lost_events: _Optional[int] = ...) -> None: ...

class Signals(_message.Message):
    __slots__ = ("ttft_s", "tpot_s", "prompt_tokens_per_s", "generation_tokens_per_s", "preemptions_per_s", "waiting_for_capacity", "cache_hit_ratio", "busy_ratio", "memory_ratio", "errors_per_s")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    BUSY_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_RATIO_FIELD_NUMBER: _ClassVar[int]
    ERRORS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    tpot_s: float
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    preemptions_per_s: float
    waiting_for_capacity: float
    cache_hit_ratio: float
    busy_ratio: float
    memory_ratio: float
    errors_per_s: float
    def __init__(self, ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., generation_tokens_per_s: _Optional[float] = ..., preemptions_per_s: _Optional[float] = ..., waiting_for_capacity: _Optional[float] = ..., cache_hit_ratio: _Optional[float] = ..., busy_ratio: _Optional[float] = ..., memory_ratio: _Optional[float] = ..., errors_per_s: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("lease", "status", "error", "ttft_s", "duration_s", "prompt_tokens", "output_tokens", "cached_tokens")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    status: int
    error: EngineError
    ttft_s: float
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, lease: _Optional[str] = ..., status: _Optional[int] = ..., error: _Optional[_Union[EngineError, str]] = ..., ttft_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class HotPrefixes(_message.Message):
    __slots__ = ("keys", "counts")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class DigestSnapshot(_message.Message):
    __slots__ = ("version", "epoch", "sequence", "block_size_tokens", "capacity", "error_rate", "num_slices", "bits_per_slice", "hash_name", "count", "bits", "checksum", "tier")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ERROR_RATE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLICES_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_SLICE_FIELD_NUMBER: _ClassVar[int]
    HASH_NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    version: int
    epoch: int
    sequence: int
    block_size_tokens: int
    capacity: int
    error_rate: float
    num_slices: int
    bits_per_slice: int
    hash_name: str
    count: int
    bits: bytes
    checksum: int
    tier: Tier
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., block_size_tokens: _Optional[int] = ..., capacity: _Optional[int] = ..., error_rate: _Optional[float] = ..., num_slices: _Optional[int] = ..., bits_per_slice: _Optional[int] = ..., hash_name: _Optional[str] = ..., count: _Optional[int] = ..., bits: _Optional[bytes] = ..., checksum: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class DigestDelta(_message.Message):
    __slots__ = ("epoch", "sequence", "added_keys", "tier", "cleared_bits", "removed_keys")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADDED_KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CLEARED_BITS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    added_keys: bytes
    tier: Tier
    cleared_bits: bytes
    removed_keys: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., added_keys: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ..., cleared_bits: _Optional[bytes] = ..., removed_keys: _Optional[int] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("settings", "resync", "drain", "resume", "advice")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    settings: PoolSettings
    resync: Resync
    drain: Drain
    resume: Resume
    advice: ReplicaAdvice
    def __init__(self, settings: _Optional[_Union[PoolSettings, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., advice: _Optional[_Union[ReplicaAdvice, _Mapping]] = ...) -> None: ...

class ReplicaAdvice(_message.Message):
    __slots__ = ("surplus_keys",)
    SURPLUS_KEYS_FIELD_NUMBER: _ClassVar[int]
    surplus_keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, surplus_keys: _Optional[_Iterable[int]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolSettings(_message.Message):
    __slots__ = ("pool", "key_namespace", "block_size_tokens", "digest_capacity", "digest_error_rate", "report_interval_s", "delta_interval_s", "snapshot_interval_s")
    POOL_FIELD_NUMBER: _ClassVar[int]
    KEY_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ERROR_RATE_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    DELTA_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    pool: str
    key_namespace: int
    block_size_tokens: int
    digest_capacity: int
    digest_error_rate: float
    report_interval_s: float
    delta_interval_s: float
    snapshot_interval_s: float
    def __init__(self, pool: _Optional[str] = ..., key_namespace: _Optional[int] = ..., block_size_tokens: _Optional[int] = ..., digest_capacity: _Optional[int] = ..., digest_error_rate: _Optional[float] = ..., report_interval_s: _Optional[float] = ..., delta_interval_s: _Optional[float] = ..., snapshot_interval_s: _Optional[float] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
