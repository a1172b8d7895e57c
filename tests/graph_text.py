"""Read the text that `print_graph` writes: `parse_graph(print_graph(graph)) == graph`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, cast

from op_registry.call import DType
from op_registry.source_location import SourceLocation

from nnscaler.ir.graph import Graph, LogicalTensor, Operation, Region, Role, Slot

_RETURNS = "returns "
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<tensor>%\w+)
      | (?P<number>-?(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|\d+|inf\b|nan\b))
      | (?P<word>[A-Za-z_][\w.:]*)
      | (?P<mark>[()\[\],=:|])
    )""",
    re.VERBOSE,
)
_ROLES = ("parameter", "buffer", "constant", "input")
_CONSTANTS = {"True": True, "False": False, "None": None}


def parse_graph(text: str) -> Graph:
    """Read the graph that a text describes; empty lines and lines that start with `#` are skipped.

    Raises ValueError with the number of the line that is not in the language.
    """
    name, loss, structure = "", "", ""
    tensors: dict[str, LogicalTensor] = {}
    operations: list[Operation] = []
    updates: list[tuple[str, str]] = []
    outputs: list[tuple[str, str]] = []
    casts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line.startswith(_RETURNS):
            structure = line.removeprefix(_RETURNS)
            continue
        reader = _LineReader(line, number)
        keyword = reader.peek()
        if keyword == "graph":
            reader.take()
            name = reader.text()
        elif keyword == "loss":
            reader.take()
            loss = reader.tensor()
            while reader.accept("to"):
                casts.append(reader.take())
        elif keyword == "result":
            reader.take()
            called = reader.text()
            reader.expect("=")
            outputs.append((called, reader.tensor()))
        elif keyword == "update":
            reader.take()
            buffer = reader.tensor()
            reader.expect("=")
            updates.append((buffer, reader.tensor()))
        elif keyword in _ROLES:
            reader.take()
            tensor = reader.declaration(cast(Role, keyword))
            tensors[tensor.name] = tensor
        else:
            operation, made = reader.operation()
            operations.append(operation)
            tensors.update({t.name: t for t in made})
        reader.end()
    return Graph(name, tensors, tuple(operations), loss, tuple(updates), tuple(outputs), structure, tuple(casts))


@dataclass
class _LineReader:
    """The tokens of one line, read from left to right."""

    line: str
    number: int
    tokens: list[tuple[str, str]] = field(default_factory=list)
    at: int = 0
    inputs: list[str] = field(default_factory=list)  # tensors among the arguments so far

    def __post_init__(self) -> None:
        position = 0
        while self.line[position:].strip():
            match = _TOKEN.match(self.line, position)
            if match is None:
                raise self.error(f"{self.line[position:].strip()[:20]!r} is not expected")
            self.tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
            position = match.end()

    def error(self, message: str) -> ValueError:
        return ValueError(f"line {self.number}: {message}: {self.line.strip()[:120]}")

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, kind: str | None = None) -> str:
        if self.at >= len(self.tokens):
            raise self.error("the line ends too early")
        found, text = self.tokens[self.at]
        if kind is not None and found != kind:
            raise self.error(f"a {kind} is expected, not {text!r}")
        self.at += 1
        return text

    def expect(self, mark: str) -> None:
        if self.take() != mark:
            self.at -= 1
            raise self.error(f"{mark!r} is expected, not {self.peek()!r}")

    def accept(self, mark: str) -> bool:
        if self.peek() == mark:
            self.at += 1
            return True
        return False

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise self.error(f"{self.peek()!r} is not expected")

    def text(self) -> str:
        """Read a word, or a string in quotes."""
        kind = self.tokens[self.at][0] if self.at < len(self.tokens) else ""
        token = self.take()
        return str(json.loads(token)) if kind == "string" else token

    def tensor(self) -> str:
        return self.take("tensor")[1:]

    def typed(self, role: Role) -> LogicalTensor:
        """Read `%name: dtype[shape] grad`."""
        name = self.tensor()
        self.expect(":")
        dtype = self.take("word")
        self.expect("[")
        shape: list[int] = []
        while not self.accept("]"):
            shape.append(int(self.take("number")))
            self.accept(",")
        needs_grad = self.accept("grad")
        master = self.take("word") if self.accept("master") else ""
        sums = self.take("word") if self.accept("sums") else ""
        return LogicalTensor(name, tuple(shape), dtype, role, needs_grad, master=master, sums=sums)

    def declaration(self, role: Role) -> LogicalTensor:
        tensor = self.typed(role)
        names: list[str] = []
        if self.accept("="):
            names.append(self.text())
            while self.accept(","):
                names.append(self.text())
        return replace(tensor, fqns=tuple(names))

    def operation(self) -> tuple[Operation, list[LogicalTensor]]:
        outputs: list[LogicalTensor | None] = []
        if self.accept("("):
            self.expect(")")
        else:
            outputs.append(None if self.accept("_") else self.typed("activation"))
            while self.accept(","):
                outputs.append(None if self.accept("_") else self.typed("activation"))
        self.expect("=")
        operator = self.text()
        self.expect("(")
        args: list[Any] = []
        kwargs: list[tuple[str, Any]] = []
        while not self.accept(")"):
            if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1][1] == "=":
                key = self.take("word")
                self.expect("=")
                kwargs.append((key, self.value()))
            else:
                args.append(self.value())
            self.accept(",")
        made = [t for t in outputs if t is not None]
        fields = self.fields(made[0].name if made else "")
        operation = Operation(
            name=fields["name"],
            operator=operator,
            inputs=tuple(self.inputs),
            args=tuple(args),
            kwargs=tuple(kwargs),
            outputs=tuple(None if t is None else t.name for t in outputs),
            region=Region(not fields["no_grad"], fields["autocast"], fields["recompute"]),
            where=fields["at"],
            module=fields["module"],
            module_type=fields["type"],
        )
        return operation, made

    def fields(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"name": name, "no_grad": False, "autocast": None, "recompute": None, "at": None}
        found |= {"module": "", "type": ""}
        text = ""
        if not self.accept("|"):
            return found
        while self.at < len(self.tokens):
            key = self.take("word")
            if key == "no_grad":
                found[key] = True
                continue
            self.expect("=")
            value = self.text()
            if key == "at":
                self.expect(":")
                found[key] = SourceLocation(value, int(self.take("number")))
            elif key == "text":
                text = value
            elif key in found:
                found[key] = value
            else:
                raise self.error(f"no field is called {key!r}")
        if text and found["at"] is not None:
            found["at"] = SourceLocation(found["at"].file, found["at"].line, text)
        return found

    def value(self) -> Any:
        """Read an argument; tensors become slots, in order."""
        if self.at >= len(self.tokens):
            raise self.error("the line ends too early")
        kind, token = self.tokens[self.at]
        if kind == "tensor":
            self.inputs.append(self.tensor())
            return Slot(len(self.inputs) - 1)
        self.at += 1
        if kind == "string":
            return json.loads(token)
        if kind == "number":
            return int(token) if re.fullmatch(r"-?\d+", token) else float(token)
        if token in ("(", "["):
            items = self.items(")" if token == "(" else "]")
            return tuple(items) if token == "(" else items
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in ("inf", "nan"):
            return float(token)
        if token == "complex":
            self.expect("(")
            real, imaginary = self.items(")")
            return complex(real, imaginary)
        if kind == "word":
            return DType(token)
        raise self.error(f"{token!r} is not expected")

    def items(self, closing: str) -> list[Any]:
        items = []
        while not self.accept(closing):
            items.append(self.value())
            self.accept(",")
        return items
