"""Bugs for `low_precision.py`: each changes one line of a generated program, chosen at random."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Sources = Mapping[str, str]
CALL = re.compile(r"^(\s+\w+ = )(comm|aten|ops|user)\.(\w+(?:\.\w+)?)\((.*?)\)(  # .*)?$")
PARAMETER = re.compile(r'^\s+"\w+": Parameter\(.*\),$')
EPSILON = re.compile(r"(?<![\w.])1e-(05|06|12)(?!\d)")


@dataclass(frozen=True, slots=True)
class Bug:
    """`change`: a line -> the wrong line, or None where it does not apply. `small`: may be less than the noise of the
    dtype, by design. `dtypes`: in which it is a bug."""

    name: str
    change: Callable[[str], str | None]
    small: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float16")


def plant(bug: Bug, sources: Sources, seed: int) -> dict[str, str] | None:
    """The program with the bug in one place; None where it has no such place. Roles that have the same line, as the
    ranks of one stage do, get it together: a bug of the generator is in all of them."""
    lines = {line for text in sources.values() for line in text.split("\n")}
    places = sorted((line, wrong) for line in lines if (wrong := bug.change(line)) is not None and wrong != line)
    if not places:
        return None
    line, wrong = random.Random(f"{bug.name} {seed}").choice(places)
    return {
        file: "\n".join(wrong if here == line else here for here in text.split("\n")) for file, text in sources.items()
    }


def _call(name: str, new: Callable[[str, str], str], where: str = "") -> Callable[[str], str | None]:
    """Changes a call of a function whose name matches: `new` gets its name and arguments."""

    def change(line: str) -> str | None:
        found = CALL.match(line)
        if found is None or not re.fullmatch(name, f"{found[2]}.{found[3]}") or where not in line:
            return None
        if '"max"' in found[4]:  # the maximum of a softmax cancels: any number does
            return None
        return found[1] + new(f"{found[2]}.{found[3]}", found[4])

    return change


def _scaled(name: str, factor: str, where: str = "") -> Callable[[str], str | None]:
    return _call(name, lambda f, a: f"{f}({a}) * {factor}", where)


def _of_axis(template: str) -> Callable[[str, str], str]:
    """`template` with {f}, {a} and {axis}: the axis that the collective runs over."""

    def new(f: str, a: str) -> str:
        axis = re.search(r"self\.\w+(?=[,)]|$)", a.partition(", ")[2])
        return template.format(f=f, a=a, first=a.partition(", ")[0], axis=axis[0] if axis else "self.dp")

    return new


def _parameter(pattern: str, text: str) -> Callable[[str], str | None]:
    return lambda line: re.sub(pattern, text, line) if PARAMETER.match(line) and re.search(pattern, line) else None


def _operand(operator: str, position: int, text: str) -> Callable[[str], str | None]:
    def new(f: str, a: str) -> str:
        parts = a.split(", ")
        return f"{f}({', '.join([*parts[:position], text, *parts[position + 1 :]])})"

    def change(line: str) -> str | None:
        found = CALL.match(line)
        if found is None or f"{found[2]}.{found[3]}" != operator or len(found[4].split(", ")) <= position:
            return None
        return _call(re.escape(operator), new)(line)

    return change


LINEAR, REDUCE = r"aten\.linear", r"comm\.all_reduce"
FLOAT8 = "{first}.to(torch.float8_e4m3fn).to({first}.dtype)"
BFLOAT16 = "{first}.bfloat16().to({first}.dtype)"
# values that the model computes, not what it derives from positions and masks
DEEP = r"aten\.(linear|gelu|silu|layer_norm)|user\.\w+"
BUGS = (
    Bug("all_reduce dropped", _call(REDUCE, _of_axis("{first}"))),
    Bug("all_reduce averages", _call(REDUCE, _of_axis("{f}({a}) / {axis}.size"))),
    Bug("all_reduce twice", _call(REDUCE, _of_axis("{f}({f}({a}), {axis})"))),
    Bug("reduced on all ranks but one", _call(REDUCE, _of_axis("{f}({first} * min({axis}.index, 1), {axis})"))),
    Bug("backward all_reduce dropped", _call(r"comm\.replicate", _of_axis("{first}"))),
    Bug("keep_first dropped", _call(r"comm\.keep_first", _of_axis("{first}"))),
    Bug("gathered in another order", _call(r"comm\.all_gather\w*", lambda f, a: f"{f}({a}).roll(2, -1)", "dim=2")),
    Bug("scattered on the wrong ranks", _call(r"comm\.reduce_scatter", lambda f, a: f"{f}({a}).flip(1)")),
    Bug("bias missing", _operand("aten.linear", 2, "None")),
    Bug("scale 1/2", _scaled(LINEAR, "0.5")),
    Bug("scale 1/3 in a norm", _scaled(r"aten\.(layer_norm|rsqrt)", "(1 / 3)")),
    Bug("scale 1.1", _scaled(DEEP, "1.1")),
    Bug("attention not causal", _operand("aten.scaled_dot_product_attention", 5, "False")),
    Bug("operand lost", _call(r"aten\.add\.Tensor", lambda f, a: a.partition(", ")[0], "linear")),
    Bug("residual twice", _call(r"aten\.add\.Tensor", lambda f, a: f"{f}({a}, alpha=2)", "linear")),
    Bug("swapped tokens", _call(LINEAR, lambda f, a: f"{f}({a}).flip(1)")),
    Bug("shard of rank 0 on all", lambda line: line.replace(".index", ".index * 0") if "first_class" in line else None),
    Bug("loss of a part", _scaled(r"ops\.ce_tail", "0.5")),
    Bug("count not summed", _call(REDUCE, _of_axis("{first}"), "count")),
    Bug("micro-batches not counted", _scaled(r"aten\.div\.Tensor", "2", "over micro")),
    Bug("activation detached", _call(DEEP, lambda f, a: f"{f}({a}).detach()")),
    Bug("other activation", lambda line: line.replace("aten.gelu(", "aten.relu(").replace("aten.silu(", "aten.gelu(")),
    Bug("gradient reduce missing", _parameter(r', reduce=\("dp",.*?\)', "")),
    Bug("tied gradient not summed", _parameter(r", copies=\(\(.*\)\)", "")),
    Bug("another layer's weight", _parameter(r"((?:blocks|layers|block)\.)2(\.)", r"\g<1>3\2")),
    Bug("scale 1.01", _scaled(DEEP, "1.01"), small=True),
    Bug("epsilon twice", lambda line: EPSILON.sub(r"2e-\1", line) if EPSILON.search(line) else None, small=True),
    Bug("gelu by tanh", lambda line: re.sub(r"(aten\.gelu\(\w+)\)", r'\1, approximate="tanh")', line), small=True),
    Bug("scale 1.001", _scaled(DEEP, "1.001"), small=True),
    Bug("sum in float8", _call(REDUCE, _of_axis(f"{{f}}({FLOAT8}, {{axis}})")), small=True),
    Bug(
        "activation in float8",
        _call(LINEAR, lambda f, a: f"{f}({a}).to(torch.float8_e5m2).to(dtypes.float32)"),
        small=True,
    ),
    Bug("scaled past the range", _scaled(LINEAR, "1e6 / 1e6"), dtypes=("float16",)),
    Bug("sum in bfloat16", _call(REDUCE, _of_axis(f"{{f}}({BFLOAT16}, {{axis}})")), small=True, dtypes=("float16",)),
)
