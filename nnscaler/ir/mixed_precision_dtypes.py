"""Mixed precision: the dtypes in which parameters are read, gradients are summed, and results are returned."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nnscaler.errors import NnscalerError

FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Precision:
    """Mixed precision with the meanings of FSDP2's MixedPrecisionPolicy. Parameters rest in the model's own dtypes.

    param        dtype to which floating parameters are cast for forward and backward; None: as they rest
    reduce       dtype in which gradients are summed over ranks; None: float32, or the parameter's if that is wider
    output       dtype to which the model's floating outputs are cast; None: as they are
    cast_inputs  cast floating inputs to `param`
    """

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in FLOATS:
                raise NnscalerError(
                    "plan_illegal", f"precision: {name} is {dtype!r}", help=f"one of {', '.join(FLOATS)}"
                )
        if not isinstance(self.cast_inputs, bool):
            raise NnscalerError("plan_illegal", f"precision: cast_inputs is {self.cast_inputs!r}, not true or false")

    def describe(self) -> str:
        """Return `bfloat16, sums in float32`."""
        words = [self.param or "", f"sums in {self.reduce}" if self.reduce else ""]
        words.append(f"output in {self.output}" if self.output else "")
        return ", ".join(word for word in words if word)


def parse_precision(text: str) -> Precision:
    """Read `bfloat16`, or `param=bfloat16,reduce=float32,output=float32,cast_inputs=false`.

    Raises NnscalerError("plan_illegal").
    """
    known = [f.name for f in fields(Precision)]
    given: dict[str, str | bool] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            name, value = "param", part
        if name not in known or name in given or (name == "cast_inputs" and value not in ("true", "false")):
            help = f"a dtype for parameters (bfloat16), or {', '.join(f'{n}=...' for n in known)}"
            raise NnscalerError("plan_illegal", f"precision {text!r}: {part!r} is not understood", help=help)
        given[name] = value == "true" if name == "cast_inputs" else value
    return Precision(**given)  # type: ignore[arg-type]
