"""`python -m nnscaler`. Prefer the `nnscaler` command: it does not put the current folder on the module path."""

import sys

from nnscaler.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
