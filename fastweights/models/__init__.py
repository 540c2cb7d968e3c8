"""The language model: its configuration, mixers, blocks and memory, and the folder that a trained one is kept in.

`fastweights.lm` trains, evaluates and generates with it, `fastweights.hf` gives it the interface of Hugging Face.
"""
