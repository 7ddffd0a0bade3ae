"""The simulator's engine with a way to take many alike steps at once.

While nobody waits and nobody prefills, each step adds one token to every sequence and takes
the same time, up to the step at which the first of them ends.
"""

from __future__ import annotations

from workers.simulator.engine import Engine


class FastEngine(Engine):
    """An engine core that can skip ahead."""

    @property
    def plain_steps(self) -> int:
        """Steps from now on in which nothing but decoding happens and nobody ends."""
        if self.waiting or not self.running:
            return 0
        left = self.config.max_num_batched_tokens
        for request in self.running:
            if request.computed != request.prompt_tokens + request.generated - 1:
                return 0
            left = min(left, request.answer_tokens - request.generated - 1)
        return max(0, left)

    @property
    def plain_step_s(self) -> float:
        """Seconds that each of them takes."""
        return self.config.timing.step_s(len(self.running), 0)

    def skip(self, steps: int) -> bool:
        """Take so many plain steps; False, and nothing taken, where blocks run out."""
        for request in self.running:
            if not self._extend(request, request.computed + steps):
                return False
        for request in self.running:
            request.computed += steps
            request.generated += steps
        tokens = steps * len(self.running)
        self.stats.steps += steps
        self.stats.step_tokens += tokens
        self.stats.generation_tokens += tokens
        return True
