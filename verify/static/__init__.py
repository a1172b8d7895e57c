"""L0: the text of the generated role programs, interpreted over layouts. Nothing is run."""

from verify.static.check import Obligation, StaticResult, check_program

__all__ = ["Obligation", "StaticResult", "check_program"]
