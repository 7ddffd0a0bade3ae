"""The admin port: metrics, probes and the fleet's state."""
