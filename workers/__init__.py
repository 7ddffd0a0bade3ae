"""The worker side: the agent beside each engine and a simulated engine."""
