from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentMessage(_message.Message):
    __slots__ = ("hello", "load", "snapshot", "delta")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    load: Load
    snapshot: DigestSnapshot
    delta: DigestDelta
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., snapshot: _Optional[_Union[DigestSnapshot, _Mapping]] = ..., delta: _Optional[_Union[DigestDelta, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("address", "models", "max_running", "agent_version")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    address: str
    models: _containers.RepeatedScalarFieldContainer[str]
    max_running: int
    agent_version: str
    def __init__(self, address: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., max_running: _Optional[int] = ..., agent_version: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("ready", "running", "waiting", "kv_usage", "age_s", "kv_blocks")
    READY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    running: float
    waiting: float
    kv_usage: float
    age_s: float
    kv_blocks: int
    def __init__(self, ready: _Optional[bool] = ..., running: _Optional[float] = ..., waiting: _Optional[float] = ..., kv_usage: _Optional[float] = ..., age_s: _Optional[float] = ..., kv_blocks: _Optional[int] = ...) -> None: ...

class DigestSnapshot(_message.Message):
    __slots__ = ("version", "epoch", "sequence", "block_size_tokens", "capacity", "error_rate", "num_slices", "bits_per_slice", "hash_name", "count", "bits", "checksum")
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
    def __init__(self, version: _Optional[int] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., block_size_tokens: _Optional[int] = ..., capacity: _Optional[int] = ..., error_rate: _Optional[float] = ..., num_slices: _Optional[int] = ..., bits_per_slice: _Optional[int] = ..., hash_name: _Optional[str] = ..., count: _Optional[int] = ..., bits: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class DigestDelta(_message.Message):
    __slots__ = ("epoch", "sequence", "added_keys")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADDED_KEYS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    added_keys: bytes
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., added_keys: _Optional[bytes] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("settings", "resync")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    settings: PoolSettings
    resync: Resync
    def __init__(self, settings: _Optional[_Union[PoolSettings, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ...) -> None: ...

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
