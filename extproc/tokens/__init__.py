"""From prompt to block keys: chat templates, tokenizers, segment caches, key chains."""
