"""Local steps in C: passes over a linear layer, and code generated for recorded steps."""
