"""What a memory did while it read a text: everything that `fastweights inspect` shows, and the page that shows it."""
