"""A training run: its loop, batches, optimiser, checkpoints, log and processes; the parts of `fastweights train`."""
