"""Measure a model on clients' data, without leaving a trace in the training run."""
