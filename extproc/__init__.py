"""kvgate's scheduler: decides whether, when and on which worker an LLM request runs."""
