"""One request's way through the core: its ticket, its lease, the room it needs, and why."""
