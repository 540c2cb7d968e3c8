"""Benchmarks: contestants take turns, must agree with the exact memory, and only then are timed and reported.

case        what is computed: rule, shape, device, dtype;  peers    other libraries that compute it
agree       whether all compute the same, against float64
timing      the clock, and turns;  report   tables, and one JSON file per machine and commit
memory, lengths, layers, host, fwl, lm, decode, lab     one benchmark each: `fastweights bench NAME`
"""
