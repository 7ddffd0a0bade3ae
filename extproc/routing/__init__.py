"""Where an admitted request goes: costs over all workers, then a pick."""
