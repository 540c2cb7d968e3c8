"""The language model: its configuration, mixers, blocks and memory, and the folder that a trained one is kept in."""
