"""Commands that ask a running scheduler and show what it says."""
