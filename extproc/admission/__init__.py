"""Whether and when a request runs: behind ``admit`` and ``release``."""
