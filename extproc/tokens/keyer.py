"""``PromptKeyer``: one pool's way from prompts to block keys.

Two caches make it cheap. Token ids are kept by segment text, so a system prompt is
tokenised once. Block keys are kept by the chain of segments up to each message boundary,
so a growing conversation costs only its new part. ``prepare`` does everything but the
cold tokenising, ``finish`` takes its result: the caller decides where that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_128_digest

from extproc.policy import PoolPolicy, TokenizationPolicy
from extproc.request.profile import (
    ChatPrompt,
    Prompt,
    RequestProfile,
    TextPrompt,
    TokenPrompt,
    UnknownPrompt,
)
from extproc.tokens.blocks import (
    TOKEN_BYTES,
    Keys,
    TokenIds,
    block_keys,
    chain_keys,
    key_namespace,
    reusable_blocks,
    root_key,
)
from extproc.tokens.cache import ByteBoundedLru
from extproc.tokens.messages import MEDIA_MARK, normalise_messages, normalise_tools
from extproc.tokens.template import ChatTemplate, TemplateFailure
from extproc.tokens.text_keys import CHARS_PER_TOKEN, known_text, text_keys
from extproc.tokens.tokenizer import SegmentTokenizer

_UNSURE_TAIL_TOKENS = 16
"""Last tokens of a cut text that may merge with what follows the cut."""
_BOUNDARY_EVERY_BLOCKS = 64
"""Chaining 64 blocks costs about 20 us: closer boundaries would cost more than they save."""
_COUNTED_TYPES = frozenset({"text", "input_text", "output_text", "function", "object"})
_NO_KEYS: Keys = np.empty(0, dtype=np.uint64)
_ENTRY_OVERHEAD_BYTES = 200
"""Dict entry, digest key and array header of one cached segment or boundary."""


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Length and reusable block keys of one prompt.

    ``exact`` says that ``tokens`` was counted and not estimated; ``keys`` may still cover
    only the part before an image or a length cap. ``by_text``: keys are over characters,
    which no engine's digest has.
    """

    tokens: int
    keys: Keys = field(default_factory=lambda: _NO_KEYS)
    exact: bool = False
    by_text: bool = False


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The key chain after some segment: keys of all full blocks and the bytes behind them."""

    keys: Keys
    tail: bytes

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + len(self.tail) + _ENTRY_OVERHEAD_BYTES


@dataclass(slots=True)
class _Part:
    """One prompt on its way: done already, or segments some of which lack their ids."""

    done: PromptKeys | None = None
    digests: list[bytes] = field(default_factory=list)
    ids: list[TokenIds | None] = field(default_factory=list)
    last_special: int = -1
    """Index of the last special token: where the next turn's prompt starts to differ."""
    complete: bool = True
    extra_tokens: int = 0


@dataclass(slots=True)
class Prepared:
    """Prompts ready but for the cold texts, in the order ``finish`` wants their ids."""

    parts: list[_Part]
    root: int
    cold: list[str]

    @property
    def cold_chars(self) -> int:
        """Characters that must be tokenised before ``finish``."""
        return sum(map(len, self.cold))


class PromptKeyer:
    """Turns the prompts of one pool's requests into block keys.

    Args:
        tokenizer: None where the pool has none: lengths are estimated, keys are over
            characters.
        template: None where the model has none: chat prompts have no keys.
        strftime_now: the date for templates that print it.
    """

    def __init__(
        self,
        pool: PoolPolicy,
        policy: TokenizationPolicy,
        tokenizer: SegmentTokenizer | None,
        template: ChatTemplate | None,
        *,
        max_prompts: int,
        media_part_tokens: int,
        strftime_now: Callable[[str], str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._strftime_now = strftime_now
        self.model = pool.model
        self._block_size = pool.block_size_tokens
        self._base_names = frozenset((pool.model, *pool.aliases))
        self._max_prompts = max_prompts
        self._media_part_tokens = media_part_tokens
        self._max_chars = policy.max_prompt_chars
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        self.namespace = key_namespace(pool.model_revision, fingerprint)
        self.segment_cache: ByteBoundedLru[bytes, TokenIds] = ByteBoundedLru(
            policy.segment_cache_bytes
        )
        self.boundary_cache: ByteBoundedLru[bytes, _Boundary] = ByteBoundedLru(
            policy.boundary_cache_bytes
        )
        self.template_failures = 0

    @property
    def exact(self) -> bool:
        """Whether this pool has a tokenizer; without, keys are over characters."""
        return self._tokenizer is not None

    @property
    def known_words(self) -> int:
        """Words whose token ids are kept."""
        return 0 if self._tokenizer is None else self._tokenizer.known_words

    def prepare(self, profile: RequestProfile) -> Prepared:
        """Render, split and look up; what is left in ``cold`` must be tokenised."""
        adapter = "" if profile.model in self._base_names else profile.model or ""
        root = root_key(self.namespace, self._block_size, adapter, profile.cache_salt)
        prepared = Prepared(parts=[], root=root, cold=[])
        for number, prompt in enumerate(profile.prompts):
            if number < self._max_prompts:
                prepared.parts.append(self._prepare(prompt, prepared))
            else:
                prepared.parts.append(_Part(done=PromptKeys(self._estimate(prompt))))
        return prepared

    def encode_cold(self, prepared: Prepared) -> list[TokenIds]:
        """Tokenise what ``prepare`` left; touches no cache, so a thread may run it."""
        if not prepared.cold or self._tokenizer is None:
            return []
        return self._tokenizer.encode(prepared.cold)

    def encode_short(self, prepared: Prepared) -> list[TokenIds]:
        """The same for short texts, on the caller's thread."""
        if not prepared.cold or self._tokenizer is None:
            return []
        return self._tokenizer.encode_quickly(prepared.cold)

    def finish(self, prepared: Prepared, encoded: list[TokenIds]) -> list[PromptKeys]:
        """Keys of every prompt, given the ids of ``prepared.cold``."""
        fresh = iter(encoded)
        finished = []
        for part in prepared.parts:
            for index, ids in enumerate(part.ids):
                if ids is None:
                    part.ids[index] = ids = next(fresh)
                    size = ids.nbytes + _ENTRY_OVERHEAD_BYTES
                    self.segment_cache.put(part.digests[index], ids, size)
            finished.append(part.done or self._chain(part, prepared.root))
        return finished

    def estimate(self, profile: RequestProfile) -> list[PromptKeys]:
        """Lengths without keys, where there is no time or place to tokenise."""
        return [PromptKeys(self._estimate(prompt)) for prompt in profile.prompts]

    def _prepare(self, prompt: Prompt, prepared: Prepared) -> _Part:
        tokenizer = self._tokenizer
        if isinstance(prompt, TokenPrompt):
            return _Part(done=self._from_ids(prompt.token_ids, prepared.root))
        if isinstance(prompt, UnknownPrompt):
            return _Part(done=PromptKeys(self._estimate(prompt)))
        if tokenizer is None:
            return _Part(done=self._by_text(prompt, prepared.root))
        if isinstance(prompt, TextPrompt):
            return self._prepare_text(prompt, prepared, tokenizer)
        text = self._render(prompt)
        if text is None:
            return _Part(done=PromptKeys(self._estimate(prompt)))
        known, mark, rest = text.partition(MEDIA_MARK)
        extra = prompt.media_parts * self._media_part_tokens
        if mark:
            extra += len(rest.replace(MEDIA_MARK, "")) // CHARS_PER_TOKEN
        return self._cut(known, prepared, tokenizer, extra, complete=not mark)

    def _prepare_text(
        self, prompt: TextPrompt, prepared: Prepared, tokenizer: SegmentTokenizer
    ) -> _Part:
        if prompt.add_special_tokens and not tokenizer.wraps_exactly:
            # Special tokens behind the text (encoder models): not a prefix of anything.
            return _Part(done=PromptKeys(self._estimate(prompt)))
        part = self._cut(prompt.text, prepared, tokenizer, 0)
        if prompt.add_special_tokens and len(tokenizer.prefix_ids):
            part.digests.insert(0, b"prefix")
            part.ids.insert(0, tokenizer.prefix_ids)
            part.last_special += 1
        return part

    def _render(self, prompt: ChatPrompt) -> str | None:
        if self._template is None:
            return None
        try:
            return self._template.render(
                normalise_messages(
                    prompt.messages,
                    self._template.content_format,
                    takes_developer=self._template.takes_developer,
                ),
                tools=normalise_tools(prompt.tools),
                documents=prompt.documents,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                extra=prompt.template_kwargs,
                now=self._strftime_now,
            )
        except TemplateFailure:
            self.template_failures += 1
            return None

    def _cut(
        self,
        text: str,
        prepared: Prepared,
        tokenizer: SegmentTokenizer,
        extra_tokens: int,
        complete: bool = True,
    ) -> _Part:
        if len(text) > self._max_chars:
            extra_tokens += (len(text) - self._max_chars) // CHARS_PER_TOKEN
            text, complete = text[: self._max_chars], False
        part = _Part(complete=complete, extra_tokens=extra_tokens)
        specials, cached = tokenizer.specials, self.segment_cache.get
        ids: TokenIds | None
        for index, segment in enumerate(tokenizer.split(text)):
            special = specials.get(segment)
            if special is not None:
                digest, ids = special
                part.last_special = index
            else:
                digest = xxh3_128_digest(segment.encode("utf-8", "surrogatepass"))
                ids = cached(digest)
                if ids is None:
                    prepared.cold.append(segment)
            part.digests.append(digest)
            part.ids.append(ids)
        return part

    def _chain(self, part: _Part, root: int) -> PromptKeys:
        chain = _chain_digests(root, part.digests)
        start, known = self._longest_boundary(chain, part)
        arrays = [ids for ids in part.ids[start:] if ids is not None]
        token_bytes = known.tail + b"".join(ids.tobytes() for ids in arrays)
        parent = int(known.keys[-1]) if len(known.keys) else root
        fresh = chain_keys(parent, token_bytes, self._block_size)
        keys = np.concatenate([known.keys, np.array(fresh, dtype=np.uint64)])
        self._remember(part, chain, start, known, keys, token_bytes)
        tokens = len(known.keys) * self._block_size + len(token_bytes) // TOKEN_BYTES
        if part.complete:
            usable = reusable_blocks(tokens, self._block_size)
        else:
            usable = max(0, tokens - _UNSURE_TAIL_TOKENS) // self._block_size
        exact = part.complete and not part.extra_tokens
        return PromptKeys(tokens + part.extra_tokens, keys[:usable], exact)

    def _longest_boundary(self, chain: list[bytes], part: _Part) -> tuple[int, _Boundary]:
        """First segment not covered, and the remembered chain up to it."""
        for index in range(len(chain) - 1, -1, -1):
            boundary = self.boundary_cache.get(chain[index])
            if boundary is not None:
                return index + 1, boundary
        return 0, _Boundary(_NO_KEYS, b"")

    def _remember(
        self,
        part: _Part,
        chain: list[bytes],
        start: int,
        known: _Boundary,
        keys: Keys,
        token_bytes: bytes,
    ) -> None:
        """Keep the chain at the last special token and every so many blocks before it."""
        end = len(known.tail)
        kept_blocks = len(known.keys)
        block_bytes = self._block_size * TOKEN_BYTES
        for index in range(start, part.last_special + 1):
            ids = part.ids[index]
            end += 0 if ids is None else ids.nbytes
            blocks = len(known.keys) + end // block_bytes
            if index == part.last_special or blocks - kept_blocks >= _BOUNDARY_EVERY_BLOCKS:
                tail = token_bytes[end - end % block_bytes : end]
                # A copy: a view would keep every key of a longer prompt alive.
                boundary = _Boundary(keys[:blocks].copy(), tail)
                self.boundary_cache.put(chain[index], boundary, boundary.size_bytes)
                kept_blocks = blocks

    def _from_ids(self, token_ids: list[int], root: int) -> PromptKeys:
        if not all(0 <= token < 2**32 for token in token_ids):
            return PromptKeys(len(token_ids))
        keys = block_keys(root, token_ids, self._block_size)
        return PromptKeys(len(token_ids), keys, exact=True)

    def _by_text(self, prompt: TextPrompt | ChatPrompt, root: int) -> PromptKeys:
        text, whole = known_text(prompt)
        if len(text) > self._max_chars:
            text, whole = text[: self._max_chars], False
        keys = text_keys(root, text, self._block_size, whole=whole)
        tokens = max(self._estimate(prompt), 1 + len(text) // CHARS_PER_TOKEN)
        return PromptKeys(tokens, keys, by_text=True)

    def _estimate(self, prompt: Prompt) -> int:
        """Tokens of a prompt that is not tokenised; at least one for any prompt."""
        if isinstance(prompt, TokenPrompt):
            return len(prompt.token_ids)
        if isinstance(prompt, UnknownPrompt):
            return 1 + prompt.chars // CHARS_PER_TOKEN
        if isinstance(prompt, TextPrompt):
            return 1 + len(prompt.text) // CHARS_PER_TOKEN
        chars = _text_chars([prompt.messages, prompt.tools, prompt.documents])
        return 1 + chars // CHARS_PER_TOKEN + prompt.media_parts * self._media_part_tokens


def _chain_digests(root: int, digests: list[bytes]) -> list[bytes]:
    """Digest of the whole text up to each segment."""
    chain = []
    current = root.to_bytes(8, "little")
    for digest in digests:
        current = xxh3_128_digest(current + digest)
        chain.append(current)
    return chain


def _is_counted(kind: object) -> bool:
    return isinstance(kind, str) and kind in _COUNTED_TYPES


def _text_chars(value: object) -> int:
    """Characters of every string in JSON data, media payloads left out."""
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict) and _is_counted(item.get("type", "text")):
            stack.extend(item.values())
    return total
