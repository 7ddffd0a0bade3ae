"""A small random-weight Llama for a real vLLM: ``python -m workers.vllm_model DIRECTORY``.

It takes the simulator's tokenizer and chat template, so both engines count the same tokens.
Weights are written in safetensors' format without torch, which only vLLM's own environment
has. The text it writes is noise; cache, events and times are the engine's own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.simulator.model import SPECIAL_TOKENS, VOCAB_SIZE, make_model_dir

Bfloat16 = npt.NDArray[np.uint16]

MAX_MODEL_LEN = 8192
ADAPTERS = ("adapter-1", "adapter-2")
ADAPTERS_FOLDER = "adapters"
_HEADS = 2
_RANK = 8
_ADAPTED = ("q_proj", "v_proj")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Size:
    """Shape of the network."""

    hidden: int
    layers: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in a KV cache of float32: keys and values."""
        return 2 * 4 * self.hidden * self.layers


SIZES: Mapping[str, Size] = {"tiny": Size(64, 2), "mid": Size(512, 8)}
"""tiny: 0.6 M parameters, for all that is not about time; mid: 25 M, whose prefill shows."""


def make_vllm_model(path: Path, size: Size, seed: int = 0) -> Path:
    """Make the model directory unless it is complete; its adapters are in ``adapters/``."""
    if _complete(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = make_model_dir(path.parent / "tokenizer")
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        for name in _TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, scratch / name)
        _write_weights(scratch, size, seed)
        _write_json(scratch / "config.json", _config(size))
        scratch.chmod(0o755)
        shutil.rmtree(path, ignore_errors=True)
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _complete(path: Path) -> bool:
    # The configuration is written last.
    return (path / "config.json").is_file()


def _config(size: Size) -> dict[str, Any]:
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": size.hidden // _HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "torch_dtype": "bfloat16",
    }


def _shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's weights."""
    hidden, inner = size.hidden, 2 * size.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB_SIZE, hidden),
    }
    for number in range(size.layers):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
    return shapes


def _write_weights(folder: Path, size: Size, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = {name: _tensor(rng, shape, 0.02) for name, shape in _shapes(size).items()}
    _save(folder / "model.safetensors", weights)
    for adapter in ADAPTERS:
        adapter_folder = folder / ADAPTERS_FOLDER / adapter
        adapter_folder.mkdir(parents=True)
        ranks = {}
        for number in range(size.layers):
            for projection in _ADAPTED:
                base = f"base_model.model.model.layers.{number}.self_attn.{projection}"
                ranks[f"{base}.lora_A.weight"] = _tensor(rng, (_RANK, size.hidden), 0.1)
                ranks[f"{base}.lora_B.weight"] = _tensor(rng, (size.hidden, _RANK), 0.1)
        _save(adapter_folder / "adapter_model.safetensors", ranks)
        _write_json(adapter_folder / "adapter_config.json", _adapter_config())


def _tensor(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Bfloat16:
    """Noise, or ones for the vectors, which are all norms."""
    if len(shape) == 1:
        values = np.ones(shape, dtype=np.float32)
    else:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    # bfloat16 is the upper half of a float32.
    return (values.view(np.uint32) >> 16).astype("<u2")


def _save(path: Path, tensors: Mapping[str, Bfloat16]) -> None:
    """safetensors: length of the header, header in JSON, then the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def _adapter_config() -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_ADAPTED),
        "inference_mode": True,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Make the models of every size asked for."""
    parser = argparse.ArgumentParser(prog="python -m workers.vllm_model", description=__doc__)
    parser.add_argument("folder", type=Path, help="each size gets a directory in it")
    parser.add_argument("--size", choices=sorted(SIZES), action="append", help="default: all")
    options = parser.parse_args()
    for name in options.size or sorted(SIZES):
        print(make_vllm_model(options.folder / name, SIZES[name]))


if __name__ == "__main__":
    main()
