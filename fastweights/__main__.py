"""`python -m fastweights` is the program `fastweights`."""

from fastweights.cli import main

if __name__ == "__main__":
    main()
