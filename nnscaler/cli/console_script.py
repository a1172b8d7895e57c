"""Run one command as the whole of a process, from its first import to its exit code: the console script's entry.

Signals are handled before anything else is imported. A command that has no verdict yet ends with no exit code of user
code's: 0 says that all was verified, and os._exit(0) in a model's file would say so without a report.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from nnscaler.cli.signals import exit_code_of, stop_in_order, tell_end


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
        code = tell_end(stop)
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


def own_exit_code() -> Callable[[int], None]:
    """Replace os._exit from here on: in this process it raises HardExit, which a command treats as it does sys.exit.

    In a thread, where that would end the thread alone, it ends the process with `COULD_NOT_RUN`. Children that are
    forked end as they say. Returns a function to be told the command's exit code: what ends the process after that,
    such as an exit handler, ends it with this code, unless that is 0 and its own says worse.
    """
    end, owner = os._exit, os.getpid()
    own: int | None = None

    def ended(code: int) -> None:
        from nnscaler.cli.output.exit_codes import ExitCode
        from nnscaler.errors import HardExit

        if os.getpid() != owner:
            end(code)
        if own is not None:
            end(own or code)
        if threading.current_thread() is threading.main_thread():
            raise HardExit(code)
        with suppress(OSError):  # what sys.stderr is at the moment may be anybody's
            os.write(2, f"error: user code ended the process: os._exit({code!r}) in a thread\n".encode())
        end(ExitCode.COULD_NOT_RUN)

    def decide(code: int) -> None:
        nonlocal own
        own = code

    os._exit = ended  # type: ignore[assignment]  # mypy knows that os._exit never returns, and not that this does not
    return decide
