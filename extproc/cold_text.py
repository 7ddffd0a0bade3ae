"""Tokenising of cold text: short text at once, long text in a bounded pool of threads.

The tokenizer gives up the GIL while it works, so other streams and health checks go on.
A request that finds the pool full, or waits too long, is routed by load instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from extproc.policy import TokenizationPolicy
from extproc.request.profile import RequestProfile
from extproc.tokens.blocks import TokenIds
from extproc.tokens.keyer import PromptKeyer, PromptKeys


class ColdText:
    """Runs :class:`PromptKeyer` where it does not hold others up.

    Args:
        count_unkeyed: called with model and reason when a prompt gets no keys for lack of
            room or time.
    """

    def __init__(
        self, policy: TokenizationPolicy, count_unkeyed: Callable[[str, str], None]
    ) -> None:
        self._policy = policy
        self._count_unkeyed = count_unkeyed
        self._threads = ThreadPoolExecutor(policy.threads, thread_name_prefix="tokenize")
        self.pending = 0

    async def keys(self, keyer: PromptKeyer, profile: RequestProfile) -> list[PromptKeys]:
        """Keys of a request's prompts; returns without waiting where the text is known."""
        prepared = keyer.prepare(profile)
        chars = prepared.cold_chars
        if chars <= self._policy.inline_max_chars:
            return keyer.finish(prepared, keyer.encode_short(prepared))
        if self.pending >= self._policy.max_pending:
            self._count_unkeyed(keyer.model, "tokenizer_busy")
            return keyer.estimate(profile)
        self.pending += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, keyer.encode_cold, prepared
        )
        work.add_done_callback(self._done)
        try:
            encoded = await asyncio.wait_for(asyncio.shield(work), self._policy.timeout_s)
        except TimeoutError:
            self._count_unkeyed(keyer.model, "tokenizer_slow")
            return keyer.estimate(profile)
        return keyer.finish(prepared, encoded)

    def close(self) -> None:
        """Finish running work and let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: asyncio.Future[list[TokenIds]]) -> None:
        # Pending counts threads' work, not waiting requests: an abandoned text still runs.
        self.pending -= 1
        if not work.cancelled():
            work.exception()  # retrieved: the waiting request, if any, raises it
