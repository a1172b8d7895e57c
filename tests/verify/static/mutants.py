"""Edits of a role's text, each of which makes the program wrong unless `equivalent` says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_CONVERSION = re.compile(
    r"(?P<indent>\s+)(?P<target>\w+) = comm\.(?P<row>\w+)"
    r"\((?P<value>\S+?), self\.(?P<axis>\w+)(?P<rest>.*?)\)(?P<hint>  #.*)?$"
)
_COMPUTED = re.compile(r"(?P<indent>\s+)(?P<target>\w+) = (?P<function>(?:aten|ops|user)\.\S+?)\((?P<args>.*)\)  #")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])")
_ROWS = ("replicate", "all_reduce", "all_reduce_replicated", "invariant", "keep_first", "all_gather", "shard")


@dataclass(frozen=True, slots=True)
class Mutant:
    kind: str
    line: int
    text: str
    after: str


def mutants(text: str) -> Iterator[Mutant]:
    """Every edit of every line."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        for kind, new in (*_conversions(line), *_computed(line), *_declared(line)):
            if new != line:
                yield Mutant(kind, number + 1, "\n".join([*lines[:number], new, *lines[number + 1 :]]), new)


def _conversions(line: str) -> Iterator[tuple[str, str]]:
    found = _CONVERSION.match(line)
    if found is None:
        return
    head, value, axis, rest = f"{found['indent']}{found['target']}", found["value"], found["axis"], found["rest"]
    yield "dropped", f"{head} = {value}"
    yield "doubled", f"{line}\n{head} = comm.{found['row']}({found['target']}, self.{axis}{rest})"
    for row in _ROWS:
        if row != found["row"]:
            cut = ", dim=0" if row in ("all_gather", "shard") else ""
            yield "other row", f"{head} = comm.{row}({value}, self.{axis}{cut}){found['hint'] or ''}"
    if "dim=" in rest:
        yield "other dim", re.sub(r"dim=(\d)", lambda m: f"dim={(int(m[1]) + 1) % 2}", line, count=1)
        yield (
            "strided",
            line.replace(rest, f"{rest}, outer=2" if "outer" not in rest else re.sub(r", outer=\d+", "", rest)),
        )


def _computed(line: str) -> Iterator[tuple[str, str]]:
    found = _COMPUTED.match(line)
    if found is None:
        return
    head, args = f"{found['indent']}{found['target']}", found["args"]
    yield "scaled", f"{line}\n{head} = aten.mul.Tensor({found['target']}, 2.0)"
    yield "one rank", f"{line}\n{head} = {found['target']} * (2.0 if self.rank == 0 else 1.0)"
    tensors = [a for a in args.split(", ") if re.match(r"^[a-z_][\w.]*$", a) and a != "self"]
    if tensors:
        yield "left out", f"{head} = {tensors[0]}"
    if len(tensors) >= 2 and tensors[0] != tensors[1]:
        first, second = tensors[:2]
        swapped = args.replace(first, "@", 1).replace(second, first, 1).replace("@", second, 1)
        yield "swapped", line.replace(f"({args})", f"({swapped})")
    for number in list(_NUMBER.finditer(line.partition("  #")[0]))[:4]:
        value = number.group()
        new = str(int(value) + 1) if value.isdigit() else repr(float(value) * 2 + 0.1)
        yield "number", line[: number.start()] + new + line[number.end() :]


def _declared(line: str) -> Iterator[tuple[str, str]]:
    if "Parameter(" in line:
        yield "sum dropped", re.sub(r", reduce=\([^)]*\)", "", line)
        yield "tie dropped", re.sub(r", copies=\(\(.*?\)\)", "", line)
        if "reduce=" not in line and "{}" in line:
            yield "sum added", line.replace("{})", '{}, reduce=("tp",))')
    if "Sharded(" in line and ("Parameter(" in line or "Input(" in line):
        yield "state", re.sub(r"Sharded\((\d)", lambda m: f"Sharded({(int(m[1]) + 1) % 2}", line)
        yield "outer dropped", re.sub(r", outer=\d+", "", line)
    if line.strip().startswith("loss = Loss"):
        yield "loss", line.replace("Partial()", "Invariant()")
    if "micro_batches =" in line:
        yield "micro-batches", re.sub(r"\d+", lambda m: str(int(m.group()) + 1), line)
    if re.match(r"^[FB]\d", line):
        words = line.split()
        yield "backward dropped", " ".join(words[:-1])
        yield "backward first", " ".join([words[-1], *words[:-1]])
    if "peers=(" in line:
        yield "peers", re.sub(r"peers=\((\d+), (\d+)", r"peers=(\2, \1", line)
    if "no_grad" in line:
        yield "region", line.replace("torch.no_grad()", "torch.enable_grad()")


_TWO_TERMS = re.compile(r" = aten\.add\.Tensor\([a-z_][\w.]*, [a-z_][\w.]*\)(  #|$)")


def equivalent(mutant: Mutant) -> bool:
    """A count has no gradient, so both all_reduces are one; how the labels that are only counted are cut is all the
    same; and so is the order of two terms."""
    counted = "_count" in mutant.after and mutant.kind == "other row" and "all_reduce" in mutant.after
    prepared = "def prepare" in mutant.text and '"micro"' not in mutant.after
    labels = prepared and '"labels": Input("labels"' in mutant.after
    terms = mutant.kind == "swapped" and _TWO_TERMS.search(mutant.after) is not None
    return counted or terms or (labels and mutant.kind == "state")
