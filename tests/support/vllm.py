"""Real vLLM servers for tests, from the environment that ``make vllm`` makes."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.system import MODEL, SLOTS, Worker, policy_for
from workers import vllm_model
from workers.middleware import SOCKET_VARIABLE
from workers.simulator import model as simulator_model
from workers.vllm_model import ADAPTERS, MAX_MODEL_LEN, SIZES, make_vllm_model
from workers.vllm_server import BLOCK_TOKENS, ENVIRONMENT, UNSET, VllmServer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_LIMIT_S = 240.0
"""The first start of all compiles Python files; a later one takes about 25 s for two."""
_SOURCES = (simulator_model, vllm_model)


def made_model(size: str) -> Path:
    """The model directory of that size, made once for these sources."""
    texts = [Path(str(source.__file__)).read_bytes() for source in _SOURCES]
    version = hashlib.sha256(b"".join(texts)).hexdigest()[:12]
    return make_vllm_model(ROOT / ".kvgate" / "vllm" / version / size, SIZES[size])


@dataclass(frozen=True)
class VllmEngines:
    """vLLM on the CPU, one thread each, with a KV cache of ``blocks`` blocks."""

    size: str = "tiny"
    blocks: int = 2048
    max_num_seqs: int = SLOTS
    max_model_len: int = MAX_MODEL_LEN
    flags: tuple[str, ...] = ()
    start_limit_s: float = START_LIMIT_S
    has_middleware: bool = True

    def command(self, worker: Worker) -> list[str]:
        assert PYTHON.is_file(), f"{PYTHON} is missing: run make vllm"
        return VllmServer(
            python=PYTHON,
            model_dir=made_model(self.size),
            size=self.size,
            model_name=MODEL,
            host="127.0.0.1",
            port=worker.port,
            kv_events_port=worker.kv_events_port,
            kv_replay_port=worker.kv_replay_port,
            blocks=self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            middleware=self.has_middleware,
            flags=("--trust-request-chat-template", *self.flags),
        ).command()

    def environment(self, worker: Worker) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        socket = {} if worker.socket is None else {SOCKET_VARIABLE: str(worker.socket)}
        return {**kept, **socket, **ENVIRONMENT}


def engine_core(worker: Worker) -> int:
    """Process id of the core that computes, behind the server that answers HTTP."""
    assert worker.engine is not None
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ours = os.getpgid(int(folder.name)) == worker.engine.pid
            if ours and b"EngineCore" in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise AssertionError("the server has no core")


def vllm_policy(model_dir: Path, **pool: Any) -> dict[str, Any]:
    """A policy of one pool of these engines; keyword arguments are fields of it."""
    fields = {"block_size_tokens": BLOCK_TOKENS, "adapters": list(ADAPTERS), **pool}
    return policy_for(model_dir, **fields)
