"""The one error type that every floor raises for what the user can fix."""

from op_registry.errors import AnnotationError, NnscalerError, few
from op_registry.spec import SourceLocation

__all__ = ["AnnotationError", "NnscalerError", "SourceLocation", "few"]
