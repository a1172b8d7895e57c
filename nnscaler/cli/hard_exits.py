"""Calls of os._exit by user code: a command that has no verdict yet ends with no exit code of theirs.

Exit code 0 says that all was verified, and 1 that something is refuted: os._exit(0) in a model's file would say so
without a report.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress


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
