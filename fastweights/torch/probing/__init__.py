"""What the memories of a PyTorch model did while it read, without a change to its output.

probes.py          `fastweights.torch.probe`, which records while it is open
measures.py        what is computed of every write, and of a memory every so many tokens
memory_records.py, layer_records.py    what is recorded of a memory, and of a Fast Weight Layer
series.py, figures.py                  what was recorded as curves and maps, and as pictures
attributions.py    `fastweights.torch.attribution`: which token's write a read comes from
"""
