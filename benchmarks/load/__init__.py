"""The load generator: sends planned requests on time and measures what clients see."""
