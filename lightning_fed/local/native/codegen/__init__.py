"""Write the recorded step of a small model in C."""
