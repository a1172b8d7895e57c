"""Run the command line as `python -m nnscaler`. Prefer the `nnscaler` command: it does not put the current folder on
the module path."""

import sys

from nnscaler.cli.console_script import run_process

if __name__ == "__main__":
    sys.exit(run_process())
