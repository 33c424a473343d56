"""Entry point of `python -m jax_ragrl`: the same command line as `ragrl`."""

import sys

from jax_ragrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
