"""The small model for a real vLLM: complete, the same each time, with one tokenizer for both."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from workers.simulator.model import make_model_dir
from workers.vllm_model import ADAPTERS, ADAPTERS_FOLDER, Size, make_vllm_model
from workers.vllm_server import MIDDLEWARE, VllmServer

SMALL = Size(hidden=8, layers=1)


def header_of(path: Path) -> dict[str, dict[str, object]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, dict[str, object]] = json.loads(data[8 : 8 + length])
    ends = [facts["data_offsets"][1] for facts in header.values() if "shape" in facts]  # type: ignore[index]
    assert max(ends) == len(data) - 8 - length
    return header


def test_a_model_has_weights_adapters_and_the_simulators_tokenizer(tmp_path: Path) -> None:
    model = make_vllm_model(tmp_path / "small", SMALL)
    weights = header_of(model / "model.safetensors")
    assert weights["lm_head.weight"]["shape"] == [4096, 8]
    assert weights["model.layers.0.mlp.up_proj.weight"]["dtype"] == "BF16"
    for adapter in ADAPTERS:
        ranks = header_of(model / ADAPTERS_FOLDER / adapter / "adapter_model.safetensors")
        assert len(ranks) == 5
    tokenizer = make_model_dir(tmp_path / "own")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (model / name).read_bytes() == (tokenizer / name).read_bytes()


def test_it_is_made_once_and_alike_everywhere(tmp_path: Path) -> None:
    first = make_vllm_model(tmp_path / "a" / "small", SMALL)
    made = (first / "config.json").stat().st_mtime_ns
    assert make_vllm_model(first, SMALL) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    second = make_vllm_model(tmp_path / "b" / "small", SMALL)
    for file in ("model.safetensors", "config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


def test_a_servers_cache_has_the_blocks_asked_for() -> None:
    server = VllmServer(
        python=Path("python"), model_dir=Path("m"), size="tiny", model_name="m", host="127.0.0.1",
        port=1, kv_events_port=2, kv_replay_port=3, blocks=10, max_num_seqs=4, flags=("--x",),
    )  # fmt: skip
    command = server.command()
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(10 * 32 * 1024)
    assert command[-3:] == ["--middleware", MIDDLEWARE, "--x"]
