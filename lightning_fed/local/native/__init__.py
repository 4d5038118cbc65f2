"""Local steps in C: passes over a linear layer, built with the package, and code generated for recorded steps."""
