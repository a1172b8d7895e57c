"""Read the text of a role program into data, with `ast`. Nothing of it runs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from op_registry.rank_expression import Expression

from nnscaler.codegen.python_text_of_calls import is_builtin, operator_origins
from nnscaler.layout import State
from nnscaler.tracing.export.custom_gradients import function_of
from verify.programs.typing.program_files.parse_stage_body import first_line, read_body
from verify.programs.typing.program_files.rank_program_syntax import (
    STREAM,
    Body,
    ExchangeText,
    InputText,
    MessageText,
    OutsideGrammar,
    ResultText,
    RoleText,
    StageText,
    StoredText,
    Unreadable,
    read_stream,
    read_value,
)

# Check the text around the stages of a role's file: names that must be defined, and the operators of the user.

OF_RUNTIME = frozenset(
    (
        "Buffer Constant Exchange Input Invariant Loss Parameter Partial Receive Replicated Result Send Sharded Stage"
        " comm dtypes ops recompute user_operators"
    ).split()
)
_NEEDED = OF_RUNTIME | {"aten", "torch", "user"}  # every other name of a stage is its own


def names_of_file(tree: ast.Module) -> Iterator[OutsideGrammar]:
    """Find unknown names in a file.

    These are names that are read before the file makes them, operators of the user that the file does not name, and
    names that a class would change.
    """
    bound: set[str] = set()
    operators: set[str] = set()
    for node in tree.body:
        for name in sorted(_read(node) - bound):
            yield OutsideGrammar(node.lineno, f"`{name}` is read, and the file has not made it")
        match node:
            case ast.Import() | ast.ImportFrom():
                bound |= {alias.name for alias in node.names if alias.name in OF_RUNTIME | {"torch"}}
            case ast.Assign(targets=[ast.Name(id=name)]):
                bound.add(name)
                if name == "user" and isinstance(node.value, ast.Call):
                    operators = {k.arg for k in node.value.keywords if k.arg}
            case ast.ClassDef(name=name):
                if name in bound:
                    yield OutsideGrammar(node.lineno, f"`{name}` is defined twice")
                bound.add(name)
                yield from _names_of_stage(node, operators)


def _read(node: ast.stmt) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    if isinstance(node, ast.ClassDef):
        return names & _NEEDED
    return {n for n in names if n in _NEEDED or n.startswith("Stage")}


def _names_of_stage(stage: ast.ClassDef, operators: set[str]) -> Iterator[OutsideGrammar]:
    for node in ast.walk(stage):
        match node:
            case ast.Attribute(value=ast.Name(id="user"), attr=name) if name not in operators:
                yield OutsideGrammar(
                    node.lineno, f"`user.{name}` is called, and the file's operators are {sorted(operators)}"
                )
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                if name.startswith("__") and not name.endswith("__"):  # Python puts the class's name before it
                    yield OutsideGrammar(
                        getattr(node, "lineno", stage.lineno), f"`{name}` is no name that a stage can have"
                    )


def user_operators(call: ast.Call) -> tuple[dict[str, str], frozenset[tuple[str, str]]]:
    """Attribute of `user` -> registered name; and the files that they come from, each with the one of this process.

    Raises Unreadable for an operator that the file takes from elsewhere than where it is registered in this process.
    """
    found: dict[str, str] = {}
    files: set[tuple[str, str]] = set()
    if ast.unparse(call.func) != "user_operators" or call.args:
        raise Unreadable(call, f"`{ast.unparse(call)}` is no header of operators")
    for keyword in call.keywords:
        given = read_value(keyword.value)
        if keyword.arg is None or not isinstance(given, tuple) or [type(g) for g in given] != [str, str, str]:
            raise Unreadable(call, f"`{ast.unparse(keyword)}` names no operator")
        name, file, qualname = given
        if is_builtin(name):  # the runtime would look in the file, and never at the operator of that name
            raise Unreadable(keyword.value, f"`{name}` is built in, and `user` has what programs load of the user's")
        names, right = _origin(name)
        if file not in names or qualname != right:
            message = f"`{name}` is taken from {file!r}, {qualname!r}, and is registered in {names[0]!r}, {right!r}"
            raise Unreadable(keyword.value, message)
        found[keyword.arg] = name
        files |= {(file, names[1])} if file.endswith(".py") else set()
    return found, frozenset(files)


def _origin(operator: str) -> tuple[tuple[str, ...], str]:
    """Return where the operator comes from, as a text may write it (a name alone, or with its folders), and its name
    there; nowhere where this process has not made it: no file is then known to have it."""
    origin = operator_origins([operator], {}).get(operator)
    if origin is not None:
        return (Path(origin[0]).name, origin[0]), origin[1]
    function = function_of(operator)
    if function is None:
        return ("",), ""
    module = sys.modules.get(function[0])
    file = getattr(module, "__file__", None) or function[0]
    return (Path(file).name, file, function[0]), function[1]


_MOST = 1 << 20  # ranks on one axis, or micro-batches
_KINDS = {"parameters": "parameter", "frozen": "frozen", "buffers": "buffer", "constants": "constant"}
_MEMBERS = "index ranks axes micro_batches time_axes inputs prepare_inputs receives sends loss results updates".split()
_OF_PARAMETERS = {"reduce": (), "copies": (), "used": True, "rest": {}, "scatter": "step", "master": "", "sums": ""}
_CLASS_OF = {"parameters": "Parameter", "frozen": "Parameter", "buffers": "Buffer", "constants": "Constant"}


def _tuple_of(kind: type, value: Any) -> bool:
    return isinstance(value, tuple) and all(type(item) is kind for item in value)


def _is_pieces(value: Any) -> bool:
    """Return whether these are messages of an exchange: (source, destination, slices there, slices here)."""
    return isinstance(value, tuple) and all(
        isinstance(piece, tuple)
        and len(piece) == 4
        and _tuple_of(int, piece[:2])
        and all(isinstance(side, tuple) and all(_tuple_of(int, s) and len(s) == 3 for s in side) for side in piece[2:])
        for piece in value
    )


# what the runtime takes for each argument of a declaration; other kinds might mean one thing here and another there
_FORMS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("fqn", "name", "key", "dtype", "master", "sums"), lambda value: type(value) is str),
    "scatter": ("step", "micro_batch").__contains__,
    "rest": lambda value: isinstance(value, dict) and all(isinstance(s, State) for s in value.values()),
    **dict.fromkeys(("used", "needs_grad"), lambda value: type(value) is bool),
    **dict.fromkeys(("messages", "backward"), _is_pieces),
    "stage": lambda value: type(value) is int,
    "peers": lambda value: _tuple_of(int, value),
    **dict.fromkeys(("reduce", "casts"), lambda value: _tuple_of(str, value)),
    "copies": lambda value: isinstance(value, tuple) and all(_tuple_of(int, ranks) for ranks in value),
    "shape": lambda value: isinstance(value, tuple) and all(type(size) in (int, dict) for size in value),
}


def read_role(file: str, text: str) -> RoleText:
    """Read a role. Raises Unreadable for a text that has no stages, ranks or schedule, or is no Python."""
    try:
        tree = ast.parse(text)
        compile(text, file, "exec", dont_inherit=True)  # what only the compiler refuses; nothing of it runs
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = ast.Pass(lineno=getattr(error, "lineno", 0) or 0, col_offset=0)
        raise Unreadable(place, f"is no Python: {error or type(error).__name__}") from error
    stages: list[StageText] = []
    values: dict[str, tuple[int, Any]] = {}
    user: dict[str, str] = {}
    problems = list(names_of_file(tree))
    for node in tree.body:
        match node:
            case ast.ClassDef():
                stages.append(_stage(file, node, text.splitlines()))
            case ast.Assign(targets=[ast.Name(id="user")], value=ast.Call() as call):
                user = user_operators(call)[0]
            case ast.Assign(targets=[ast.Name(id=name)]) if name in ("STAGES", "RANKS", "SCHEDULE"):
                values[name] = (node.lineno, read_value(node.value))
            case ast.Assign(targets=[ast.Name(id="aten")]) if ast.unparse(node.value) == "torch.ops.aten":
                pass
            case ast.Import(names=[ast.alias(name="torch", asname=None)]):
                pass
            case ast.ImportFrom(module="nnscaler.runtime", level=0) if all(
                alias.asname is None and alias.name in OF_RUNTIME for alias in node.names
            ):
                pass
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                problems.append(OutsideGrammar(node.lineno, f"`{first_line(node)}` is no part of a rank program"))
    missing = {"STAGES", "RANKS", "SCHEDULE"} - set(values)
    if missing or not stages:
        raise Unreadable(tree, f"has no {', '.join(sorted(missing)) or 'stages'}")
    if not _tuple_of(int, values["RANKS"][1]) or type(values["SCHEDULE"][1]) is not str:
        raise Unreadable(tree, f"RANKS is {values['RANKS'][1]!r}, and SCHEDULE {values['SCHEDULE'][1]!r}")
    declared = [v.name for v in values["STAGES"][1]]
    if declared != [f"Stage{s.index}" for s in stages]:
        problems.append(OutsideGrammar(values["STAGES"][0], f"STAGES is {declared}, and the classes are otherwise"))
    return RoleText(
        file,
        values["RANKS"][1],
        tuple(values["SCHEDULE"][1].split()),
        values["SCHEDULE"][0],
        tuple(stages),
        user,
        tuple(problems),
    )


def _stage(file: str, node: ast.ClassDef, source: Sequence[str]) -> StageText:
    found: dict[str, tuple[ast.expr, int]] = {}
    bodies: dict[str, Body] = {}
    more = (node.keywords, node.decorator_list, getattr(node, "type_params", ()))
    if [ast.unparse(b) for b in node.bases] != ["Stage"] or any(more):
        raise Unreadable(node, f"`class {node.name}` is no stage")
    for member in node.body:
        match member:
            case ast.FunctionDef(name="forward" | "prepare"):
                bodies[member.name] = read_body(member, source)
            case ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = (member.value, member.lineno)
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                raise Unreadable(member, f"`{first_line(member)}` is no part of a stage")
    if (unknown := set(found) - {*_KINDS, *_MEMBERS, *STREAM, "slices"}) or "forward" not in bodies:
        raise Unreadable(node, f"`class {node.name}` has {sorted(unknown)}" if unknown else "a stage without forward")
    given = {n: read_value(found[n][0]) for n in ("index", "ranks", "axes", "micro_batches", "slices") if n in found}
    if len(fixed := {"slices": 1, **given}) < 5:
        raise Unreadable(node, f"`class {node.name}` lacks index, ranks, axes or micro_batches")
    time_axes, updates = (read_value(found[n][0]) if n in found else {} for n in ("time_axes", "updates"))
    sizes = (fixed["micro_batches"], fixed["slices"], *fixed["axes"].values(), *time_axes.values())
    named = all(type(axis) is str for axis in (*fixed["axes"], *time_axes)) and type(fixed["index"]) is int
    if node.name != f"Stage{fixed['index']}" or not named or not all(type(n) is int and 1 <= n <= _MOST for n in sizes):
        raise Unreadable(node, f"`class {node.name}` has index {fixed['index']}, axes and micro-batches {sizes}")
    if not fixed["ranks"] or not _tuple_of(int, fixed["ranks"]) or not _tuple_of(str, (*updates, *updates.values())):
        raise Unreadable(node, f"`class {node.name}` has the ranks {fixed['ranks']} and the updates {updates}")
    return StageText(
        file,
        node.lineno,
        fixed["index"],
        fixed["ranks"],
        fixed["axes"],
        fixed["micro_batches"],
        tuple(s for name in _KINDS for s in _stored(name, found)),
        tuple(_inputs("inputs", found)),
        tuple(_inputs("prepare_inputs", found)),
        tuple(_message(call, v) for v, call in _entries(found, "receives")),
        tuple(_message(call, "") for call in _items(found, "sends")),
        *_loss(found),
        updates,
        bodies.get("prepare"),
        bodies["forward"],
        tuple(source),
        tuple(_result(call, name) for name, call in _entries(found, "results")),
        *(time_axes, fixed["slices"]),
        *read_stream(node, {name: found[name][0] for name in STREAM if name in found}),
    )


def _entries(found: Mapping[str, tuple[ast.expr, int]], name: str) -> list[tuple[str, ast.Call]]:
    if name not in found:
        return []
    node = found[name][0]
    if not isinstance(node, ast.Dict):
        raise Unreadable(node, f"`{name}` is no dict")
    entries: list[tuple[str, ast.Call]] = []
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str) or not isinstance(value, ast.Call):
            raise Unreadable(value, f"`{ast.unparse(value)}` declares nothing in `{name}`")
        if any(key.value == other for other, _ in entries):
            raise Unreadable(key, f"{key.value!r} is declared twice in `{name}`")
        entries.append((key.value, value))
    return entries


def _items(found: Mapping[str, tuple[ast.expr, int]], name: str) -> list[ast.Call]:
    if name not in found:
        return []
    node = found[name][0]
    if not isinstance(node, ast.Tuple) or not all(isinstance(e, ast.Call) for e in node.elts):
        raise Unreadable(node, f"`{name}` is no tuple of declarations")
    return [e for e in node.elts if isinstance(e, ast.Call)]


def _arguments(call: ast.Call, names: Sequence[str], optional: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return the class that is called, and its arguments by name; those that are not `optional` are all there."""
    if len(call.args) > len(names):
        raise Unreadable(call, f"`{ast.unparse(call)}` has too many arguments")
    given = dict(zip(names, (read_value(a) for a in call.args), strict=False))
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in given or keyword.arg not in names:
            raise Unreadable(call, f"`{ast.unparse(call)}` has an argument {keyword.arg or ast.unparse(keyword)!r}")
        given[keyword.arg] = read_value(keyword.value)
    if lacking := [name for name in names if name not in given and name not in optional]:
        raise Unreadable(call, f"`{ast.unparse(call)}` does not say its {' and '.join(lacking)}")
    if odd := [name for name, value in given.items() if name in _FORMS and not _FORMS[name](value)]:
        raise Unreadable(call, f"`{ast.unparse(call)}`: {odd[0]} is {given[odd[0]]!r}, which the runtime does not take")
    return ast.unparse(call.func), given


def _states(call: ast.Call, value: Any) -> dict[str, State]:
    if isinstance(value, dict) and all(isinstance(s, State) for s in value.values()):
        return value
    raise Unreadable(call, f"`{ast.unparse(call)}`: the layout is no dict of states by axis")


def _stored(group: str, found: Mapping[str, tuple[ast.expr, int]]) -> list[StoredText]:
    result: list[StoredText] = []
    for variable, call in _entries(found, group):
        more = tuple(_OF_PARAMETERS) if _CLASS_OF[group] == "Parameter" else ()
        kind, given = _arguments(call, ("fqn", "shape", "dtype", "states", *more), ("states", *more))
        if kind != _CLASS_OF[group]:
            raise Unreadable(call, f"`{ast.unparse(call)}` is no entry of `{group}`")
        result.append(
            StoredText(
                call.lineno,
                _KINDS[group],
                variable,
                given["fqn"],
                given["shape"],
                given["dtype"],
                _states(call, given.get("states", {})),
                *(given.get(name, default) for name, default in _OF_PARAMETERS.items()),
            )
        )
    return result


def _inputs(group: str, found: Mapping[str, tuple[ast.expr, int]]) -> list[InputText]:
    result: list[InputText] = []
    for variable, call in _entries(found, group):
        kind, given = _arguments(call, ("name", "states"), ("states",))
        if kind != "Input":
            raise Unreadable(call, f"`{ast.unparse(call)}` is no input")
        result.append(InputText(call.lineno, variable, given["name"], _states(call, given.get("states", {}))))
    return result


def _message(call: ast.Call, variable: str) -> MessageText | ExchangeText:
    kind = ast.unparse(call.func)
    if kind == "Exchange":
        _, given = _arguments(
            call, ("key", "stage", "messages", "backward", "shape", "dtype", "needs_grad"), ("dtype", "needs_grad")
        )
        needs_grad, dtype = given.get("needs_grad", True), given.get("dtype", "float32")
        sides, shape = (tuple(given["messages"]), tuple(given["backward"])), _shape(call, given["shape"])
        return ExchangeText(call.lineno, given["key"], given["stage"], *sides, shape, dtype, needs_grad, variable)
    if kind == "Receive" and variable:
        _, given = _arguments(call, ("key", "stage", "shape", "dtype", "peers", "needs_grad"), ("needs_grad",))
    elif kind == "Send" and not variable:
        _, given = _arguments(call, ("key", "stage", "peers", "needs_grad"), ("needs_grad",))
    else:
        raise Unreadable(call, f"`{ast.unparse(call)}` is no message")
    return MessageText(
        call.lineno,
        given["key"],
        given["stage"],
        tuple(given["peers"]),
        given.get("needs_grad", True),
        variable,
        _shape(call, given.get("shape", ())),
        given.get("dtype", ""),
    )


def _shape(call: ast.Call, value: Any) -> tuple[int | Expression, ...]:
    """Return a local shape, in which `{"dp": (3, 2)}` is a size by the index on an axis."""
    sizes: list[int | Expression] = []
    for size in value:
        if isinstance(size, dict):
            if not all(isinstance(t, tuple) and t and all(type(n) is int for n in t) for t in size.values()):
                raise Unreadable(call, f"`{ast.unparse(call)}`: {size} is no size by the index on an axis")
            size = Expression(0, tuple(size.items()))
        sizes.append(size)
    return tuple(sizes)


def _result(call: ast.Call, name: str) -> ResultText:
    kind, given = _arguments(call, ("shape", "dtype", "states"), ("states",))
    if kind != "Result" or not _tuple_of(int, given["shape"]):
        raise Unreadable(call, f"`{ast.unparse(call)}` is no entry of `results`")
    return ResultText(call.lineno, name, given["shape"], given["dtype"], _states(call, given.get("states", {})))


def _loss(found: Mapping[str, tuple[ast.expr, int]]) -> tuple[Mapping[str, State] | None, tuple[str, ...]]:
    if "loss" not in found:
        return None, ()
    if not isinstance(node := found["loss"][0], ast.Call) or ast.unparse(node.func) != "Loss":
        raise Unreadable(node, f"`{ast.unparse(node)}` is no loss")
    given = _arguments(node, ("states", "casts"), ("states", "casts"))[1]
    return _states(node, given.get("states", {})), given.get("casts", ())
