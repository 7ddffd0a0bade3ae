"""A vLLM look-alike: its scheduler, cache, timing, HTTP, KV events and metrics, no model."""
