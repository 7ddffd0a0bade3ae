"""A real vLLM on the CPU with one of our small models: its command line and environment.

For tests and demonstrations. vLLM lives in an environment of its own (``make vllm``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.vllm_model import ADAPTERS, ADAPTERS_FOLDER, MAX_MODEL_LEN, SIZES

BLOCK_TOKENS = 32
"""The least that vLLM's CPU attention takes."""
MIDDLEWARE = "workers.middleware.KvgateMiddleware"
UNSET = ("PYTHONDONTWRITEBYTECODE",)
"""Without .pyc files every start would compile all of vLLM again."""
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """One server with prefix caching, KV events, replay and adapters.

    Args:
        python: interpreter of vLLM's environment.
        size: name of the model's size, as its directory holds it.
        blocks: size of the KV cache.
    """

    python: Path
    model_dir: Path
    size: str
    model_name: str
    host: str
    port: int
    kv_events_port: int
    kv_replay_port: int
    blocks: int
    max_num_seqs: int
    max_model_len: int = MAX_MODEL_LEN
    middleware: bool = True
    flags: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """What to run."""
        # The CLI, ``vllm serve``, asks for a package named vllm; the CPU build has another name.
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *self._flags()]
        if self.middleware:
            command += ["--middleware", MIDDLEWARE]
        return [*command, *self.flags]

    def _flags(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # vLLM binds to an address with a star; to any other it connects.
            "endpoint": f"tcp://*:{self.kv_events_port}",
            "replay_endpoint": f"tcp://*:{self.kv_replay_port}",
        }
        adapters = [f"{name}={self.model_dir / ADAPTERS_FOLDER / name}" for name in ADAPTERS]
        cache_bytes = self.blocks * BLOCK_TOKENS * SIZES[self.size].kv_bytes_per_token
        return [
            "--model", str(self.model_dir),
            "--served-model-name", self.model_name,
            "--host", self.host,
            "--port", str(self.port),
            # A CPU without bfloat16 units takes five times as long with it.
            "--dtype", "float32",
            "--block-size", str(BLOCK_TOKENS),
            "--kv-cache-memory-bytes", str(cache_bytes),
            "--max-model-len", str(self.max_model_len),
            "--max-num-seqs", str(self.max_num_seqs),
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            "--enable-auto-tool-choice",
            "--tool-call-parser", "hermes",
            "--kv-events-config", json.dumps(events),
            "--enable-lora",
            "--max-loras", str(len(ADAPTERS)),
            "--lora-modules", *adapters,
        ]  # fmt: skip
