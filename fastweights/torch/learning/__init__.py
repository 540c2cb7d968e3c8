"""How a Fast Weight Layer of PyTorch (`fastweights.torch.FWLBlock`) is read and trained.

The mathematics is in fastweights/fwl.py (the published layer) and fastweights/refresh.py (the refreshed one). Here are
the ways to compute it fast:

    reading the refreshed layer     refresh.py; where no gradient is wanted held.py, by hand, with held_single.py (one
                                    document on a CPU) and held_overlapped.py (16-bit products on a GPU)
    training the refreshed layer    training_loss.py, which chooses between walk.py (every row carries weights of its
                                    own from chunk to chunk; on a CPU) and dual.py (products with earlier tokens; on a
                                    GPU), the latter with dual_passes.py and gathered.py
    training the published layer    published_loss.py, with published_memory.py and published_passes.py
"""
