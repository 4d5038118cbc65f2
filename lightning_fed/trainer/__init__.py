"""Everything that touches Lightning: loops, hooks, its private names, checks of a trainer, the state of a module."""
