"""How a Fast Weight Layer of PyTorch (`fastweights.torch.FWLBlock`) is read and trained.

The mathematics is in fastweights/fwl.py (the published layer) and fastweights/refresh.py (the refreshed one), in
operations that autograd differentiates. Here are the faster ways to compute it, most of them by hand:

    reading the refreshed layer     refresh.py, with the order of chunks in layout.py; where no gradient is wanted
                                    held.py, in place, with held_single.py (one document on a CPU) and
                                    held_overlapped.py (16-bit products on a GPU)
    training the refreshed layer    training_loss.py, with training_layout.py; it chooses between walk.py (every row
                                    carries weights of its own from chunk to chunk; on a CPU) and dual.py (products
                                    with earlier tokens, with gathered.py; on a GPU). Their letters are in loss_form.py,
                                    their elementwise operations in dual_passes.py and kernels/fwl_dual.py
    training the published layer    published_loss.py, with published_memory.py, and published_passes.py or
                                    kernels/fwl.py

Reading the published layer needs nothing of this: its three memories are `fast_weight` memories.
"""
