"""Generate C code for the recorded step of a small model."""
