"""Parse the text of an annotation into an `Annotation`, with errors that point into the text.

Whether a `+` is a mark or makes an operand additive is decided by what it touches: `k+` is a mark, a `+` that starts
an operand makes it additive, and any other `+` is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from op_registry.annotation.syntax_tree import (
    REDUCTIONS,
    Annotation,
    Concat,
    Dim,
    Group,
    Identifier,
    Integer,
    Mark,
    Opaque,
    Operand,
    Reduction,
)
from op_registry.errors import AnnotationError, annotation_error

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<name>(?:[^\W\d]\w*|\*)(?P<mark>\+(?:[^\W\d]\w*)?|\^|<(?:[^\W\d]\w*)?)?)"
    r"|(?P<integer>[0-9]+(?P<frozen>\^)?)"
    r"|(?P<arrow>->)"
    r"|(?P<symbol>[,()\[\]?+])"
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "name", "integer", "->", "end", or the symbol itself
    text: str
    start: int
    end: int
    mark: str = ""


@lru_cache(maxsize=16384)
def parse(text: str) -> Annotation:
    """Parse an annotation. Raises `AnnotationError` (code `annotation_syntax`) with a caret at the place."""
    return _Parser(text).annotation()


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _error(text, f"unexpected character {text[position]!r}", position, position + 1, _legal_at(tokens))
        kind = str(match.lastgroup)
        if match["name"] is not None:
            mark = match["mark"] or ""
            tokens.append(_Token("name", match[0][: len(match[0]) - len(mark)], position, match.end(), mark))
        elif match["integer"] is not None:
            tokens.append(_Token("integer", match[0].rstrip("^"), position, match.end()))
        elif kind != "space":
            tokens.append(_Token(match[0], match[0], position, match.end()))
        position = match.end()
    tokens.append(_Token("end", "", len(text), len(text) + 1))
    return tokens


def _legal_at(tokens: list[_Token]) -> str:
    if tokens and tokens[-1].kind == "name":
        return "after a name may follow a mark (`+`, `^`, `<`), a dim, `,` or `->`"
    return "a dim is a name, `*`, an integer, `(a b)` or `[a b]`"


def _error(text: str, message: str, start: int, end: int, hint: str | None) -> AnnotationError:
    return annotation_error("annotation_syntax", message, text, [(start, end)], hint=hint)


class _Parser:
    """Recursive descent; one method per rule of the grammar in `syntax`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.position = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def take(self) -> _Token:
        token = self.token
        self.position += 1
        return token

    def fail(self, message: str, hint: str | None = None, token: _Token | None = None) -> AnnotationError:
        at = token or self.token
        return _error(self.text, message, at.start, at.end, hint)

    def annotation(self) -> Annotation:
        inputs = self.side("->")
        if self.token.kind != "->":
            raise self.fail("an annotation has one `->` between its inputs and its outputs", "`m k+, k+ n -> m n`")
        self.take()
        outputs = self.side("end")
        if self.token.kind == "->":
            raise self.fail("a second `->`", "an annotation has one `->` between its inputs and its outputs")
        return Annotation(inputs, outputs)

    def side(self, until: str) -> tuple[Operand | Opaque, ...]:
        if self.token.kind in ("->", "end"):
            return ()
        operands = [self.operand()]
        while self.token.kind == ",":
            self.take()
            operands.append(self.operand())
        if self.token.kind not in ("->", "end"):
            raise self.fail(f"unexpected `{self.token.text}`", f"`,` or {'the end' if until == 'end' else '`->`'}")
        return tuple(operands)

    def operand(self) -> Operand | Opaque:
        first = self.token
        if first.kind in (",", "->", "end"):
            raise self.fail("an empty operand", "a scalar tensor is written `()`; a side without operands is empty")
        if first.kind == "?":
            self.take()
            if self.token.kind not in (",", "->", "end"):
                raise self.fail("`?` stands alone: it is a whole operand", "`a b, ? -> a b`")
            return Opaque(first.start, first.end)
        additive = first.kind == "+"
        if additive:
            self.take()
            if self.token.kind in (",", "->", "end", "?", "+"):
                raise self.fail("`+` before an operand needs the operand's dims", "`+n`, or `+()` for a scalar")
        if self.token.kind == "(" and self.tokens[self.position + 1].kind == ")":
            self.take()
            last = self.take()
            if self.token.kind not in (",", "->", "end"):
                raise self.fail("`()` is a whole operand: a scalar tensor has no dims", "separate operands with `,`")
            return Operand((), additive, first.start, last.end)
        dims: list[Dim] = []
        while self.token.kind not in (",", "->", "end"):
            dims.append(self.dim(dims))
        return Operand(tuple(dims), additive, first.start, dims[-1].end)

    def dim(self, before: list[Dim]) -> Dim:
        token = self.token
        if token.kind == "name":
            name = self.name()
            if name.is_wildcard and any(isinstance(d, Identifier) and d.is_wildcard for d in before):
                raise self.fail("`*` twice in one operand", "one `*` stands for any number of dims", token)
            return name
        if token.kind == "integer":
            self.take()
            return Integer(int(token.text), token.start, token.end)
        if token.kind == "(":
            return self.group()
        if token.kind == "[":
            return self.concat()
        raise self.unexpected()

    def unexpected(self) -> AnnotationError:
        token = self.token
        if token.kind == "+":
            hint = "a mark touches its name (`k+`); a `+` that makes an operand additive comes first in it (`, +n`)"
            return self.fail("a `+` that belongs to nothing", hint)
        if token.kind == "?":
            return self.fail("`?` stands alone: it is a whole operand", "`a b, ? -> a b`")
        hint = "a dim is a name, `*`, an integer, `(a b)` or `[a b]`"
        return self.fail(f"unexpected {'end' if token.kind == 'end' else f'`{token.text}`'}", hint)

    def name(self) -> Identifier:
        token = self.take()
        mark: Mark = ""
        reduction: Reduction = "sum"
        if token.mark == "^":
            mark = "^"
        elif token.mark[:1] == "<":
            return Identifier(token.text, "<", reduction, token.start, token.end, token.mark[1:])
        elif token.mark:
            mark = "+"
            wanted = token.mark[1:] or "sum"
            known = [r for r in REDUCTIONS if r == wanted]
            if not known:
                hint = f"reductions are {', '.join(REDUCTIONS)}; a space separates dims: `{token.text}+ {wanted}`"
                raise self.fail(f"unknown reduction `{wanted}` of `{token.text}`", hint, token)
            reduction = known[0]
        return Identifier(token.text, mark, reduction, token.start, token.end)

    def group(self) -> Group:
        first = self.take()
        factors: list[Identifier | Integer] = []
        while self.token.kind != ")":
            token = self.token
            if token.kind == "name" and token.text != "*":
                factors.append(self.name())
            elif token.kind == "integer":
                self.take()
                factors.append(Integer(int(token.text), token.start, token.end))
            elif token.kind == "end" or token.kind in (",", "->"):
                raise self.fail("this `(` is never closed", "`(a b)`", first)
            else:
                raise self.fail(f"`{token.text}` inside `( )`", "a group holds names and integers only: `(a 3)`")
        last = self.take()
        if not factors:
            raise self.fail("an empty group among dims", "a scalar tensor is an operand of its own: `, ()`", first)
        self.refuse_mark(last)
        return Group(tuple(factors), first.start, last.end)

    def concat(self) -> Concat:
        first = self.take()
        parts: list[Identifier] = []
        while self.token.kind != "]":
            token = self.token
            if token.kind == "name" and token.text != "*":
                parts.append(self.name())
            elif token.kind == "end" or token.kind in (",", "->"):
                raise self.fail("this `[` is never closed", "`[a b]`", first)
            else:
                raise self.fail(f"`{token.text}` inside `[ ]`", "a concatenation holds names only: `[q k v]`")
        last = self.take()
        if not parts:
            raise self.fail("an empty concatenation", "`[q k v]`", first)
        self.refuse_mark(last)
        return Concat(tuple(parts), first.start, last.end)

    def refuse_mark(self, closing: _Token) -> None:
        if self.token.kind == "+" and self.token.start == closing.end:
            raise self.fail("a mark on a group", "marks stand on the identifiers inside: `(a+ b)`")
