"""A training run: its loop, batches, optimiser, checkpoints, log and processes; what `fastweights train` is built of."""
