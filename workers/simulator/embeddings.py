"""Embeddings: the prompt is computed, the vector means nothing."""

from __future__ import annotations

from typing import Any

from workers.simulator.dialects import Reply
from workers.simulator.errors import ApiError
from workers.simulator.generation import Piece
from workers.simulator.prompt import Prompter

Json = dict[str, Any]
DIMENSIONS = 8


class EmbeddingsDialect:
    """``/v1/embeddings``: never streamed, nothing generated."""

    opens = False
    streams = False
    generates = False

    def prompts(self, prompter: Prompter, body: Json) -> list[list[int]]:
        """Token ids of every input."""
        return prompter.completions(body.get("input"), "input")

    def opening(self, _reply: Reply) -> bytes:
        """Nothing."""
        return b""

    def piece(self, _reply: Reply, _piece: Piece) -> bytes:
        """Nothing."""
        return b""

    def closing(self, _reply: Reply) -> bytes:
        """Nothing."""
        return b""

    def whole(self, reply: Reply) -> Json:
        """A vector for each input."""
        data = [
            {"index": index, "object": "embedding", "embedding": _vector(ids)}
            for index, ids in enumerate(reply.prompt_ids)
        ]
        tokens = reply.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return {"object": "list", "data": data, "model": reply.model, "usage": usage}

    def failure(self, _error: ApiError) -> bytes:
        """Nothing."""
        return b""


def _vector(ids: list[int]) -> list[float]:
    # Any fixed function of the ids will do; equal inputs must have equal vectors.
    return [((sum(ids) * (k + 1) * 2_654_435_761) % 2001 - 1000) / 1000 for k in range(DIMENSIONS)]
