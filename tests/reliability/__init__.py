"""Long checks that are commands: `make soak`, `make steps`, `make fuzz`, `make properties`, `make kill`.

`make test` runs a small version of each; docs/reliability.md has the figures of the long ones.
"""
