"""What is sent: planned requests, from traces or made by seed, and their prompts."""
