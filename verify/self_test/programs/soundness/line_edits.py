"""Random edits of lines: operands, numbers, operators, order, conversions, and the same in other words."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import torch

from nnscaler.ir.conversion_table_and_paths import ROWS
from verify.self_test.programs.mutants.editable_program_and_edits import Role, Statement
from verify.self_test.programs.mutants.mutant import Edit, Edits
from verify.self_test.programs.soundness.harmless_edits import FORMS, PYTHON
from verify.self_test.programs.soundness.program_under_random_edits import FED, NEAR, STORED, Draft, Propose

_WHOLE = ("replicate", "invariant", "all_reduce", "all_reduce_replicated", "keep_first", "keep_first_replicated")
_CUTTING = ("shard", "shard_replicated", "all_gather", "all_gather_replicated", "place", "reduce_scatter")
_STATE = re.compile(r"Sharded\((\d+)((?:, \w+=(?:\d+|\([\d, ]*\)))*)\)")
_ALIKE = (  # operators of equal signature
    ("gelu", "relu", "silu", "tanh.default", "sigmoid", "exp.default", "neg", "square", "abs", "cos", "sin", "alias"),
    ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum"),
    ("sum.default", "mean.default", "amax", "prod.default"),
    ("softmax.int", "log_softmax.int"),
    ("reshape", "view", "expand"),
    ("linear", "matmul"),
    ("ops.ce_max", "ops.ce_sumexp", "ops.ce_count", "ops.ce_pick"),
)
_NEEDS = re.compile(r"needs `([\w.]+)` ([^`]+?) over (\w+) \(.*?\), and it is ([^`]+?) there")
_LOSS = re.compile(r"the loss is ([^`]+?) over (\w+), and declared ([A-Z]\w+)")
_LITERAL = re.compile(
    r"(?<![\w.@\"'-])(?:\d+\.\d+(?:e-?\d+)?|0|[1-9]\d*|True|False|None|\((?:\d+, ?)+\d*\)|\[(?:\d+, ?)+\d+\])(?![\w.@])"
)


def _visible(draft: Draft, statement: Statement) -> list[str]:
    """Return the variables and stored tensors that the line may read."""
    made = draft.subject.made_before(statement)
    held = [e for e in draft.subject.role_of(statement).entries if e.stage == statement.stage]
    stored = [f"self.{e.name}" for e in held if e.section in STORED]
    return [*made, *stored, *(e.name for e in held if e.section in (*FED, "receives"))]


def _at(how: Callable[[Draft, Random, Statement], Edits | None], prefix: str = "") -> Propose:
    """Propose what `how` makes of one statement whose callee has this prefix."""

    def propose(draft: Draft, chance: Random) -> Edits | None:
        statement = draft.statement(chance, prefix)
        return None if statement is None else how(draft, chance, statement)

    return propose


def _tensors(draft: Draft, statement: Statement) -> list[int]:
    known = set(_visible(draft, statement))
    return [i for i, a in enumerate(statement.arguments) if a in known]


def _operand(draft: Draft, chance: Random, statement: Statement) -> Edits | None:
    """Another tensor in the place of an operand."""
    places = _tensors(draft, statement)
    if not places:
        return None
    place = chance.choice(places)
    return (statement.becomes(statement.with_argument(place, chance.choice(_visible(draft, statement))).call),)


def _turned_operands(draft: Draft, chance: Random, statement: Statement) -> Edits | None:
    """Two operands change places."""
    places = _tensors(draft, statement)
    if len(places) < 2:
        return None
    one, two = chance.sample(places, 2)
    first, second = statement.arguments[one], statement.arguments[two]
    return (statement.becomes(statement.with_argument(one, second).with_argument(two, first).call),)


def _operator(_: Draft, chance: Random, statement: Statement) -> Edits | None:
    """Another operator of the same signature."""
    for group in _ALIKE:
        names = [name if "." in name and name.startswith("ops.") else f"aten.{name}" for name in group]
        if statement.callee in names:
            return (statement.becomes(statement.call.replace(statement.callee, chance.choice(names), 1)),)
    return None


def _moved(draft: Draft, chance: Random) -> Edits | None:
    """Two neighbouring lines change places."""
    pairs = [
        (a, b)
        for role in draft.subject.roles
        for a, b in zip(role.statements, role.statements[1:], strict=False)
        if b.line == a.line + 1 and a.indent == b.indent
    ]
    if not pairs:
        return None
    one, two = chance.choice(pairs)
    return (one.becomes_text(two.text), two.becomes_text(one.text))


def _left_out(draft: Draft, chance: Random, statement: Statement) -> Edits | None:
    """An operation is left out: one of its operands is the result."""
    places = _tensors(draft, statement)
    if not places or len(statement.targets) > 1:
        return None
    return (statement.becomes(statement.arguments[chance.choice(places)]),)


def _number(draft: Draft, chance: Random) -> Edits | None:
    """Another number, table or flag, in a line, a declaration, or beside them."""
    heads = {
        r.file: next(n for n, text in enumerate(r.lines) if text.startswith("class ")) for r in draft.subject.roles
    }
    numbered = ((r, n, text) for r in draft.subject.roles for n, text in enumerate(r.lines, 1) if n > heads[r.file])
    lines = [(r, n) for r, n, text in numbered if _literals(text)]
    close = [(r, n) for r, n in lines if (r.file, n) in draft.lines]
    if not lines:
        return None
    role, number = chance.choice(close if close and chance.random() < NEAR else lines)
    text = role.lines[number - 1]
    start, end = chance.choice(_literals(text))
    return (Edit(role.file, number, text, text[:start] + _other(chance, text[start:end]) + text[end:]),)


def _literals(text: str) -> list[tuple[int, int]]:
    """Where numbers stand in the code of a line."""
    code = text.partition("  #")[0]
    if ("=" not in code and ":" not in code and "(" not in code) or code.lstrip().startswith(
        ("#", '"""', "class", "def")
    ):
        return []
    return [m.span() for m in _LITERAL.finditer(code)]


def _other(chance: Random, literal: str) -> str:
    value = ast.literal_eval(literal)
    if value is None or isinstance(value, bool):
        return repr(chance.choice([v for v in (True, False, None) if v is not value]))
    if isinstance(value, int | float):
        return repr(chance.choice((value + 1, value - 1, 2 * value, -value, 0, 1, value // 2 if value else 2)))
    items = list(value)
    match chance.choice(("turn", "shuffle", "change", "move")):
        case "turn":
            items.append(items.pop(0))
        case "shuffle":
            chance.shuffle(items)
        case "change":
            items[chance.randrange(len(items))] += chance.choice((-1, 1))
        case _:
            one, two = chance.randrange(len(items)), chance.randrange(len(items))
            items[one], items[two] = items[one] + 1, items[two] - 1
    return repr(type(value)(items))


def _schedule(draft: Draft, chance: Random) -> Edits | None:
    """Two instructions change places."""
    role = chance.choice(draft.subject.roles)
    order = list(role.order)
    one, two = (chance.randrange(len(order)) for _ in range(2))
    order[one], order[two] = order[two], order[one]
    return (role.reordered(order),)


# -- conversions ------------------------------------------------------------------------------------------------------


def _conversion(draft: Draft, chance: Random, variable: str, stage: int) -> str:
    """A call of a row of the table on a variable. Cuts are mostly those that the text has somewhere."""
    axes, in_time = draft.subject.axes[stage], chance.random() < 0.05
    axis = chance.choice([*axes, *(draft.in_time if in_time or not axes else [])])
    if chance.random() < 0.55:
        return f"comm.{chance.choice(_WHOLE)}({variable}, self.{axis})"
    known = [m.groups() for text in draft.sources.values() for m in _STATE.finditer(text)]
    dim, more = chance.choice(known) if known and chance.random() < 0.7 else (str(chance.randrange(3)), "")
    if chance.random() < 0.1:
        return f"comm.all_to_all({variable}, self.{axis}, {chance.randrange(3)}, {dim})"
    return f"comm.{chance.choice(_CUTTING)}({variable}, self.{axis}, dim={dim}{more})"


def _converted(draft: Draft, chance: Random) -> Edits | None:
    """An operand, a result or what is returned is converted."""
    returns = [(r, n) for r in draft.subject.roles for n, text in enumerate(r.lines, 1) if "return {" in text]
    if returns and chance.random() < 0.25:
        role, number = chance.choice(returns)
        before = [s for s in role.statements if s.line < number]
        return _returned(chance, role, number, _conversion(draft, chance, "{}", before[-1].stage)) if before else None
    statement = draft.statement(chance)
    if statement is None:
        return None
    if chance.random() < 0.4 and statement.targets[0] != "_":
        target = chance.choice(statement.targets)
        return (statement.becomes(statement.call, f"{target} = {_conversion(draft, chance, target, statement.stage)}"),)
    places = _tensors(draft, statement)
    if not places:
        return None
    place = chance.choice(places)
    return _put_in(statement, place, _conversion(draft, chance, statement.arguments[place], statement.stage))


def _put_in(statement: Statement, place: int, value: str) -> Edits:
    """A line before the statement, whose result is its operand there."""
    name = f"converted_{statement.line}"
    line = f"{statement.indent}{', '.join(statement.targets)} = {statement.with_argument(place, name).call}"
    return (statement.becomes_text(f"{statement.indent}{name} = {value}\n{line}"),)


def _returned(chance: Random, role: Role, number: int, value: str) -> Edits | None:
    """A returned variable is converted; `value` is the call, of `{}`."""
    text = role.lines[number - 1]
    names = re.findall(r": (\w+)", text)
    if not names:
        return None
    name = chance.choice(names)
    indent = text[: len(text) - len(text.lstrip())]
    made = f"{indent}{name}_r = {value.format(name)}"
    return (Edit(role.file, number, text, f"{made}\n{text.replace(f': {name}', f': {name}_r', 1)}"),)


def _other_conversion(draft: Draft, chance: Random, statement: Statement) -> Edits | None:
    """Another row of the table, or none."""
    if chance.random() < 0.3:
        return (statement.becomes(statement.arguments[0]),)
    if chance.random() < 0.5:
        other = chance.choice((*_WHOLE, *_CUTTING))
        return (statement.becomes(statement.call.replace(statement.callee, f"comm.{other}", 1)),)
    return (statement.becomes(_conversion(draft, chance, statement.arguments[0], statement.stage)),)


def _repaired(draft: Draft, chance: Random) -> Edits | None:
    """Follow a hint of the reader: convert an operand to the state that it should have, or the loss to the declared
    one.

    It turns any wrong start into a text that the reader can type further.
    """
    wanted = [(m[1], m[2], m[3]) for m in _LOSS.finditer(draft.said)]
    rows = {(before.__name__, after.__name__): row.function for (before, after), row in ROWS.items()}
    if wanted:
        have, axis, need = chance.choice(wanted)
        place = chance.choice(
            [(r, n) for r in draft.subject.roles for n, t in enumerate(r.lines, 1) if '"loss": ' in t]
        )
        return _returned(chance, *place, _row(rows, have, need, axis))
    found = [(m[1], m[2], m[3], m[4]) for m in _NEEDS.finditer(draft.said)]
    statements = [s for s in draft.subject.statements() if (s.file, s.line) in draft.lines and _tensors(draft, s)]
    if not found or not statements:
        return None
    tensor, need, axis, have = chance.choice(found)
    statement = chance.choice(statements)
    held = [a for i in _tensors(draft, statement) if _is_held(draft, statement, a := statement.arguments[i], tensor)]
    variable = chance.choice(held or [statement.arguments[i] for i in _tensors(draft, statement)])
    return _put_in(statement, statement.arguments.index(variable), _row(rows, have, need, axis).format(variable))


def _is_held(draft: Draft, statement: Statement, variable: str, tensor: str) -> bool:
    found = draft.subject.tensor(statement.stage, variable)
    return variable.removeprefix("self.") == tensor or (found is not None and found.name == tensor)


def _row(rows: Mapping[tuple[str, str], str], have: str, need: str, axis: str) -> str:
    """The conversion from one state to another, of `{}`; of a state to itself, any that says so."""
    one, two = have.partition("(")[0], need.partition("(")[0]
    cut = next((text for text in (need, have) if text.startswith("Sharded(")), "")
    more = ", dim=" + cut.removeprefix("Sharded(")[:-1] if cut and one != two else ""
    return f"comm.{rows.get((one, two), 'replicate')}({{}}, self.{axis}{more})"


# -- the same in other words ------------------------------------------------------------------------------------------


def _renamed(draft: Draft, chance: Random, statement: Statement) -> Edits | None:
    """A variable has another name in the whole file."""
    if statement.targets[0] == "_":
        return None
    name = chance.choice(statement.targets)
    role = draft.subject.role_of(statement)
    word = re.compile(rf"(?<![\w.\"'@]){re.escape(name)}(?![\w\"'@]|=)")
    changed = [(n, text, word.sub(f"{name}_x", text)) for n, text in enumerate(role.lines, 1)]
    return tuple(Edit(role.file, n, old, new) for n, old, new in changed if old != new)


def _said_twice(_: Draft, chance: Random, statement: Statement) -> Edits | None:
    """A line is computed twice, a tensor has two names, or a comment is gone."""
    match chance.choice(("unused", "alias", "comment")):
        case "unused":
            return (statement.becomes(statement.call, f"unused = {statement.call}"),)
        case "alias" if len(statement.targets) == 1:
            target = statement.targets[0]
            return (
                statement.becomes_text(
                    f"{statement.indent}named = {statement.call}\n{statement.indent}{target} = named"
                ),
            )
    bare = statement.text.partition("  #")[0]
    return (statement.becomes_text(bare),) if bare != statement.text else None


def _schema(callee: str) -> list[str]:
    """The names of an operator's arguments."""
    name, _, overload = callee.removeprefix("aten.").partition(".")
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload or "default", None)
    return [] if found is None else [a.name for a in found._schema.arguments]


def _by_keyword(_: Draft, chance: Random, statement: Statement) -> Edits | None:
    """The last arguments are given by name; sometimes one gets another's."""
    names = _schema(statement.callee)
    if statement.keywords or not 1 < len(statement.arguments) <= len(names):
        return None
    count = len(statement.arguments)
    first = chance.randrange(count)
    rest = names[first:count]
    if chance.random() < 0.3:
        chance.shuffle(rest)
    named = tuple(zip(rest, statement.arguments[first:], strict=True))
    return (statement.becomes(replace(statement, arguments=statement.arguments[:first], keywords=named).call),)


def _by_operator(_: Draft, chance: Random, statement: Statement) -> Edits | None:
    """`a + b` for a call, or another operator of Python."""
    if len(statement.arguments) != 2 or statement.keywords:
        return None
    one, two = statement.arguments
    mark = PYTHON.get(statement.callee.removeprefix("aten."))
    if mark is None or chance.random() < 0.2:
        mark = chance.choice(list(PYTHON.values()))
    return (statement.becomes(f"{one} {mark} {two}" if chance.random() < 0.8 else f"{two} {mark} {one}"),)


def _there_and_back(_: Draft, chance: Random, statement: Statement) -> Edits | None:
    """Two permutations of a result, which mostly undo each other."""
    if len(statement.targets) > 1:
        return None
    name, dims = statement.targets[0], [0, 1, 2, -1, -2]
    one, two = chance.sample(dims, 2)
    back = (one, two) if chance.random() < 0.7 else tuple(chance.sample(dims, 2))
    turned = f"{name}_t = aten.transpose.int({name}, {one}, {two})"
    again = f"{name} = aten.transpose.int({name}_t, {back[0]}, {back[1]})"
    return (statement.becomes(statement.call, turned, again),)


def _in_another_form(draft: Draft, chance: Random) -> Edits | None:
    """One line as another form has it, which means the same by construction."""
    form = chance.choice([form for form in FORMS if form.rewrite is not None])
    edits = list(form.edits(draft.subject))
    return (chance.choice(edits),) if edits else None


LINES: Mapping[str, Propose] = {
    "conversion put in": _converted,
    "conversion changed": _at(_other_conversion, "comm."),
    "conversion asked for": _repaired,
    "number": _number,
    "operand": _at(_operand),
    "operands turned": _at(_turned_operands),
    "operator": _at(_operator),
    "lines turned": _moved,
    "line left out": _at(_left_out),
    "instructions turned": _schedule,
    "renamed": _at(_renamed),
    "said twice": _at(_said_twice),
    "by keyword": _at(_by_keyword, "aten."),
    "by operator": _at(_by_operator, "aten."),
    "there and back": _at(_there_and_back),
    "in another form": _in_another_form,
}
SAME = (
    "renamed",
    "said twice",
    "by keyword",
    "in another form",
    "declarations turned",
)  # kinds that mostly say the same otherwise
