"""``PromptKeyer``: one pool's way from prompts to block keys.

Two caches make it cheap. Token ids are kept by segment text, so a system prompt is
tokenised once. Block keys are kept by the hash of the text up to each message boundary,
so that of a growing conversation only the new part is looked at. ``prepare`` does everything
but the cold tokenising, ``finish`` takes its result: the caller decides where that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
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
from extproc.tokens.boundaries import (
    ENTRY_OVERHEAD_BYTES,
    NO_KEYS,
    NOTHING,
    Boundaries,
    Boundary,
    Landmark,
    Piece,
)
from extproc.tokens.cache import ByteBoundedLru
from extproc.tokens.estimate import estimated_tokens
from extproc.tokens.messages import MEDIA_MARK, normalise_messages, normalise_tools
from extproc.tokens.template import ChatTemplate, TemplateFailure
from extproc.tokens.text_keys import CHARS_PER_TOKEN, known_text, text_keys
from extproc.tokens.tokenizer import SegmentTokenizer

_UNSURE_TAIL_TOKENS = 16
"""Last tokens of a cut text that may merge with what follows the cut."""
_BOUNDARY_EVERY_BLOCKS = 64
"""Chaining 64 blocks costs about 20 us: closer boundaries would cost more than they save."""


class PromptKeys(msgspec.Struct, frozen=True):
    """Length and reusable block keys of one prompt.

    ``exact`` says that ``tokens`` was counted and not estimated; ``keys`` may still cover
    only the part before an image or a length cap. ``by_text``: keys are over characters,
    which no engine's digest has.
    """

    tokens: int
    keys: Keys = msgspec.field(default_factory=lambda: NO_KEYS)
    exact: bool = False
    by_text: bool = False


@dataclass(slots=True)
class _Part:
    """One prompt on its way: done already, or what is known of it and the pieces behind that."""

    done: PromptKeys | None = None
    known: Boundary = NOTHING
    pieces: list[Piece] = field(default_factory=list)
    landmarks: list[Landmark] = field(default_factory=list)
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
        self.segment_cache: ByteBoundedLru[bytes, bytes] = ByteBoundedLru(
            policy.segment_cache_bytes
        )
        self.boundaries = Boundaries(policy.boundary_cache_bytes)
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
                prepared.parts.append(_Part(done=PromptKeys(self._tokens_of(prompt))))
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
        return [part.done or self._chain(part, prepared.root, fresh) for part in prepared.parts]

    def estimate(self, profile: RequestProfile) -> list[PromptKeys]:
        """Lengths without keys, where there is no time or place to tokenise."""
        return [PromptKeys(self._tokens_of(prompt)) for prompt in profile.prompts]

    def _prepare(self, prompt: Prompt, prepared: Prepared) -> _Part:
        tokenizer = self._tokenizer
        if isinstance(prompt, TokenPrompt):
            return _Part(done=self._from_ids(prompt.token_ids, prepared.root))
        if isinstance(prompt, UnknownPrompt):
            return _Part(done=PromptKeys(self._tokens_of(prompt)))
        if tokenizer is None:
            return _Part(done=self._by_text(prompt, prepared.root))
        if isinstance(prompt, TextPrompt):
            return self._prepare_text(prompt, prepared, tokenizer)
        text = self._render(prompt)
        if text is None:
            return _Part(done=PromptKeys(self._tokens_of(prompt)))
        known, mark, rest = text.partition(MEDIA_MARK)
        extra = prompt.media_parts * self._media_part_tokens
        if mark:
            extra += len(rest.replace(MEDIA_MARK, "")) // CHARS_PER_TOKEN
        return self._cut(known, prepared, tokenizer, extra_tokens=extra, complete=not mark)

    def _prepare_text(
        self, prompt: TextPrompt, prepared: Prepared, tokenizer: SegmentTokenizer
    ) -> _Part:
        if prompt.add_special_tokens and not tokenizer.wraps_exactly:
            # Special tokens behind the text (encoder models): not a prefix of anything.
            return _Part(done=PromptKeys(self._tokens_of(prompt)))
        wrapped = prompt.add_special_tokens
        prefix = tokenizer.prefix_ids.tobytes() if wrapped else b""
        return self._cut(prompt.text, prepared, tokenizer, prefix=prefix)

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
        *,
        prefix: bytes = b"",
        extra_tokens: int = 0,
        complete: bool = True,
    ) -> _Part:
        """What is known of a text, and the pieces behind that.

        Args:
            prefix: ids ahead of the text.
        """
        if len(text) > self._max_chars:
            extra_tokens += (len(text) - self._max_chars) // CHARS_PER_TOKEN
            text, complete = text[: self._max_chars], False
        data = text.encode("utf-8", "surrogatepass")
        known = self.boundaries.known(
            prepared.root,
            prefix,
            data,
            lambda start: tokenizer.special_spans(data, start),
            may_leap=tokenizer.specials_stand_apart,
        )
        part = _Part(known=known.boundary or Boundary(NO_KEYS, prefix), landmarks=known.landmarks)
        part.complete, part.extra_tokens = complete, extra_tokens
        add, special_ids = part.pieces.append, tokenizer.special_bytes
        end = known.end
        for (start, stop), digest in zip(known.spans, known.digests, strict=True):
            if start > end:
                add(self._text_piece(data[end:start], prepared))
            add(Piece(digest, special_ids[data[start:stop]], special=True, end=stop))
            end = stop
        if end < len(data):
            add(self._text_piece(data[end:], prepared))
        return part

    def _text_piece(self, text: bytes, prepared: Prepared) -> Piece:
        digest = xxh3_128_digest(text)
        ids = self.segment_cache.get(digest)
        if ids is None:
            prepared.cold.append(text.decode("utf-8", "surrogatepass"))
        return Piece(digest, ids, special=False)

    def _chain(self, part: _Part, root: int, encoded: Iterator[TokenIds]) -> PromptKeys:
        known = part.known
        ids = [self._ids(piece, encoded) for piece in part.pieces]
        token_bytes = known.tail + b"".join(ids)
        parent = int(known.keys[-1]) if len(known.keys) else root
        fresh = chain_keys(parent, token_bytes, self._block_size)
        keys = np.concatenate([known.keys, np.array(fresh, dtype=np.uint64)])
        self._remember(part, ids, keys, token_bytes)
        tokens = len(known.keys) * self._block_size + len(token_bytes) // TOKEN_BYTES
        if part.complete:
            usable = reusable_blocks(tokens, self._block_size)
        else:
            usable = max(0, tokens - _UNSURE_TAIL_TOKENS) // self._block_size
        exact = part.complete and not part.extra_tokens
        return PromptKeys(tokens + part.extra_tokens, keys[:usable], exact)

    def _ids(self, piece: Piece, encoded: Iterator[TokenIds]) -> bytes:
        if piece.ids is not None:
            return piece.ids
        ids = next(encoded).tobytes()
        self.segment_cache.put(piece.digest, ids, len(ids) + ENTRY_OVERHEAD_BYTES)
        return ids

    def _remember(self, part: _Part, ids: list[bytes], keys: Keys, token_bytes: bytes) -> None:
        """Keep the chain at the last special token and every so many blocks before it."""
        specials = [index for index, piece in enumerate(part.pieces) if piece.special]
        if not specials:
            return
        end = len(part.known.tail)
        known_blocks = kept_blocks = len(part.known.keys)
        block_bytes = self._block_size * TOKEN_BYTES
        for index in range(specials[-1] + 1):
            end += len(ids[index])
            blocks = known_blocks + end // block_bytes
            far = blocks - kept_blocks >= _BOUNDARY_EVERY_BLOCKS
            if index == specials[-1] or (far and part.pieces[index].special):
                tail = token_bytes[end - end % block_bytes : end]
                # A copy: a view would keep every key of a longer prompt alive.
                boundary = Boundary(keys[:blocks].copy(), tail)
                self.boundaries.remember(part.landmarks, part.pieces[index], boundary)
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
        tokens = max(self._tokens_of(prompt), 1 + len(text) // CHARS_PER_TOKEN)
        return PromptKeys(tokens, keys, by_text=True)

    def _tokens_of(self, prompt: Prompt) -> int:
        return estimated_tokens(prompt, self._media_part_tokens)
