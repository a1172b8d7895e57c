"""The one error type that every floor raises for what the user can fix, and the exit that user code may call."""

from op_registry.errors import AnnotationError, NnscalerError, few
from op_registry.source_location import SourceLocation

__all__ = ["GUARD_MAIN", "AnnotationError", "HardExit", "NnscalerError", "SourceLocation", "exit_call", "few"]

GUARD_MAIN = 'put what a script does under: if __name__ == "__main__":'  # helps where one exits, or reads arguments


class HardExit(SystemExit):
    """A call of os._exit(code) by user code, in the main thread of a command."""

    def __str__(self) -> str:
        return exit_call(self)


def exit_call(stop: SystemExit) -> str:
    """Return the call that raised it: `sys.exit(0)`, or `os._exit(0)`."""
    return f"{'os._exit' if isinstance(stop, HardExit) else 'sys.exit'}({stop.code!r})"
