"""Exit codes of the process. Only a verdict gives 1: Python's own code for an uncaught exception is 1 as well, so
`main` catches everything."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """
    VERIFIED        everything that was checked agrees
    REFUTED         a counter-example exists
    COULD_NOT_RUN   usage, the user's model does not import or trace, an illegal plan
    INCONCLUSIVE    not decided, or nothing was checked
    INTERNAL_ERROR  a bug of ours
    INTERRUPTED     Ctrl-C
    TERMINATED      SIGTERM
    """

    VERIFIED = 0
    REFUTED = 1
    COULD_NOT_RUN = 2
    INCONCLUSIVE = 3
    INTERNAL_ERROR = 101
    INTERRUPTED = 130
    TERMINATED = 143
