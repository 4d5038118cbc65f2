"""Local steps of many clients at once, as one stack of models."""
