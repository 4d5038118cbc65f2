"""The paper's experiments: their settings, runs that can be resumed, and figures and tables of runs."""
