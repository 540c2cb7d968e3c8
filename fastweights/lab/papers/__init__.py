"""One file per figure or table of the papers: claim, cost, settings, run, plot, check (see `fastweights.lab`)."""
