"""L0: type the text of the generated role programs with layouts. Nothing is run. `check` describes the method."""

from verify.programs.typing.check_text_computes_graph import Obligation, StaticResult, check_program

__all__ = ["Obligation", "StaticResult", "check_program"]
