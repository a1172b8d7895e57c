"""The start of a command's process: signals are handled before anything else is imported."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from nnscaler.cli.hard_exits import own_exit_code
from nnscaler.cli.signals import Terminated, exit_code_of, stop_in_order


def run_process() -> int:
    """Run the command line as this process's only work: the console script's entry. Returns the exit code.

    Importing torch, its exporter and sympy makes millions of objects that live to the end. The collector of cycles
    would walk them again and again while they are made, and once more when the interpreter ends: a third of a short
    command's time. What a command itself drops in cycles is still collected, in larger batches.
    """
    stopped = stop_in_order()
    decide = own_exit_code()
    try:
        import gc

        from nnscaler.cli.main import main

        gc.set_threshold(200_000, 20, 20)
        code = main()
        gc.freeze()
    except KeyboardInterrupt as stop:  # while `main` was imported: after that it raises nothing
        print("terminated" if isinstance(stop, Terminated) else "interrupted", file=sys.stderr)
        code = exit_code_of(stop)
    signal = stopped()
    code = code if signal is None else exit_code_of(signal)
    decide(code)
    if code and "RANK" in os.environ:
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End a rank whose daemon threads may be waiting for others, in C++, without taking Python down around them.

    One that comes back then, since another rank has ended, would abort the process, which would look like the cause.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
