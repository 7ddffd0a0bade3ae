"""The workers: who is there, who can take a request, and what each is doing."""
