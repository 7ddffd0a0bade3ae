"""A small Hugging Face style tokenizer directory, made without network.

Byte-level BPE trained on the standard library's sources, with a ChatML chat template. Both
sides of a test, gateway and engine, load it as they would load a real model's.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions you may call, one JSON object a line:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- 'Call one by <call>{"name": ..., "arguments": ...}</call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<call>{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def make_model_dir(path: Path) -> Path:
    """Make the directory unless it is complete; safe when several processes try at once."""
    if _complete(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _train().save(str(scratch / "tokenizer.json"))
        _write_json(scratch / "tokenizer_config.json", _tokenizer_config())
        _write_json(scratch / "config.json", {"model_type": "simulated", "vocab_size": VOCAB_SIZE})
        scratch.chmod(0o755)
        _move_into_place(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _complete(path: Path) -> bool:
    return all((path / name).is_file() for name in _FILES)


def _move_into_place(scratch: Path, path: Path) -> None:
    try:
        os.rename(scratch, path)
    except OSError:
        if _complete(path):
            return  # another process was faster; both made the same files
        shutil.rmtree(path)
        os.rename(scratch, path)


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer.train([str(source) for source in sources], trainer)
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
