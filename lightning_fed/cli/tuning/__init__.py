"""Parts of ``lightning-fed tune``: search space, plan, trials, journal, successive halving, report."""
