"""What operators see: metrics and logs, never prompt text."""
