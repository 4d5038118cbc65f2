"""Everything that touches Lightning's Trainer: loops, hooks, the local clock, checks, the state of a module."""
