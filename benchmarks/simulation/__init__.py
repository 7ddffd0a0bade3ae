"""A cluster under virtual time: the scheduler's core, simulated engines, scripted trouble."""
