"""The paper's experiments: what is run, one run that can be resumed, and the figures and tables drawn from runs."""
