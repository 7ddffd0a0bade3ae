"""From HTTP path, headers and body to a ``RequestProfile``."""
