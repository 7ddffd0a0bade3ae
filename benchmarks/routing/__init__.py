"""Routing and the order of the queue, tried under virtual time."""
