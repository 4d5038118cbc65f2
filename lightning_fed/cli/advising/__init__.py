"""Parts of ``lightning-fed advise``: measure a run, try learning rates, name settings by their keys, report."""
