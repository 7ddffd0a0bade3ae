"""Block keys over characters, for pools without a tokenizer.

A block is as many characters as a token block has tokens, times four. Such keys equal nothing
that an engine tells of its cache: they find only what was routed here before, which is enough
for a conversation or a system prompt to stay where it is.
"""

from __future__ import annotations

import json

import numpy as np
from xxhash import xxh3_64_intdigest

from extproc.request.profile import ChatPrompt, TextPrompt
from extproc.tokens.blocks import Keys, chain_keys, reusable_blocks
from extproc.tokens.messages import MEDIA_MARK, normalise_messages

CHARS_PER_TOKEN = 4
"""Rough size of text that is not tokenised."""


def known_text(prompt: TextPrompt | ChatPrompt) -> tuple[str, bool]:
    """Text that grows as the conversation does, and whether it is all of the prompt.

    It ends at the first image or other medium.
    """
    if isinstance(prompt, TextPrompt):
        return prompt.text, True
    try:
        known, mark, _ = _whole_text(prompt).partition(MEDIA_MARK)
    except RecursionError:
        return "", False  # nested deeper than any engine reads
    return known, not mark


def _whole_text(prompt: ChatPrompt) -> str:
    head = [prompt.tools, prompt.documents, dict(prompt.template_kwargs)]
    pieces = [json.dumps(each) for each in head if each]
    for message in normalise_messages(prompt.messages, "string"):
        rest = {name: value for name, value in message.items() if name != "content"}
        pieces += [json.dumps(rest), message["content"]]
    return "".join(pieces)


def text_keys(root: int, text: str, block_size_tokens: int, *, whole: bool) -> Keys:
    """Keys of the full blocks of a text.

    Args:
        root: of the pool, adapter and salt.
        whole: it is a whole prompt, whose end no cache can serve.
    """
    block_chars = block_size_tokens * CHARS_PER_TOKEN
    blocks = reusable_blocks(len(text), block_chars) if whole else len(text) // block_chars
    # UTF-32 has four bytes a character, as token ids have.
    characters = text[: blocks * block_chars].encode("utf-32-le", "surrogatepass")
    start = xxh3_64_intdigest(b"text", root)
    return np.array(chain_keys(start, characters, block_chars), dtype=np.uint64)
