"""One client's answer: its visit, and the ways to take a local step."""
