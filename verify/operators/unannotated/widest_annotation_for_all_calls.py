"""The widest annotation that holds for every call of an operator that has none, and the code that registers it.
Nothing is suggested that was not tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch._library.custom_ops import OPDEFS

from op_registry.annotation.parser import parse
from op_registry.call import Call, DType, TensorArgument
from op_registry.infer_torch_schema import SchemaError, infer_schema
from op_registry.spec import AnnotationFunction, OperatorSpec

from nnscaler.errors import AnnotationError, NnscalerError
from nnscaler.exception_in_one_line import first_line, in_one_line
from nnscaler.is_user_file import is_installed
from verify.evidence.inputs.concrete_call import function_of
from verify.operators.suggest.ask_oracle import report_on, with_annotation
from verify.operators.suggest.call_with_other_tensors_and_integers import make_question
from verify.operators.suggest.infer_widest_annotation import Suggestion, infer_annotation
from verify.operators.unannotated.find_unannotated_calls import Form, Missing, shown
from verify.results.verdict import Verdict, merge

Gradient = Literal["derivative", "custom"]


@dataclass(frozen=True)
class Advice:
    """The suggestion for one operator.

    texts     the annotation of each form of its calls, None where nothing of it can be split; empty: see `reason`
    verdict   on the texts together
    own       whether all were tested on the model's own shapes
    gradient  "custom": they hold, but the operator's own backward is not the derivative of its forward
    reason    why there is no annotation
    """

    texts: tuple[str | None, ...] = ()
    verdict: Verdict = Verdict.INCONCLUSIVE
    own: bool = False
    gradient: Gradient = "derivative"
    reason: str = ""

    @property
    def found(self) -> bool:
        return any(text is not None for text in self.texts)

    @property
    def text(self) -> str | None:
        """The one annotation of all calls; None where they differ."""
        return self.texts[0] if len(set(self.texts)) == 1 else None


def advise(spec: OperatorSpec, forms: Sequence[Form]) -> Advice:
    """Infer an annotation and test it. Never raises for what the operator does."""
    if _is_random(spec):
        return Advice(reason="it draws random numbers, which no annotation makes the same on every rank")
    advice = _advise(spec, forms)
    if advice.found or not isinstance(getattr(spec.target, "__self__", None), type):
        return advice
    custom = _advise(replace(spec, gradient="custom"), forms)  # its backward may be none of its forward
    return replace(custom, gradient="custom") if custom.found else advice


def _advise(spec: OperatorSpec, forms: Sequence[Form]) -> Advice:
    found: list[list[Suggestion]] = []
    raised = ""
    for form in forms:
        try:
            found.append(infer_annotation(spec, form.call))
        except NnscalerError as error:
            found.append([])
            raised = first_line(error.message)
        except Exception as error:  # noqa: BLE001 - the operator may raise anything on inputs of our choice
            found.append([])
            raised = in_one_line(error)
    own = all(form.own for form in forms)
    common = _common(spec, forms, found)
    if common is not None:
        return Advice((common.text,) * len(forms), common.report.verdict, own)
    texts = tuple(s[0].text if s else None for s in found)
    verdict = merge(s[0].report.verdict for s in found if s)
    reason = "" if any(found) else raised or "no annotation was found under which anything of it could be split"
    return Advice(texts, verdict, own, reason=reason)


def _common(spec: OperatorSpec, forms: Sequence[Form], found: Sequence[Sequence[Suggestion]]) -> Suggestion | None:
    """Return the widest annotation that was found for every form, tested on all of them at once; None where they
    differ."""
    if not found or not all(found):
        return None
    if len(found) == 1:
        return found[0][0]
    for candidate in found[0]:
        if not all(candidate.text in {s.text for s in others} for others in found[1:]):
            continue
        function = function_of(spec.name, spec)
        try:
            questions = [make_question(spec, function, form.call) for form in forms]
            report = report_on(with_annotation(spec, candidate.text, questions))
        except AnnotationError:
            continue
        if report.verdict.passes:
            return Suggestion(candidate.text, report)
    return None


def _is_random(spec: OperatorSpec) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(spec.target, "tags", ())


# The code that registers a suggested annotation, and where it goes.


@dataclass(frozen=True)
class Stub:
    """An annotation as code.

    code   ready to paste
    place  a description of the place where it goes
    file   that the place is in
    above  line of the file before which it goes; 0: any line after the operator's definition
    """

    code: str
    place: str
    file: str | None = None
    above: int = 0


class NoStub(Exception):
    """No code registers this operator; the message says why, and what to do."""


def write_stub(missing: Missing, spec: OperatorSpec, forms: Sequence[Form], advice: Advice) -> Stub:
    """Return the code for an operator. Raises NoStub where registration cannot take it."""
    options = ', gradient="custom"' if advice.gradient == "custom" else ""
    function = annotation_function(missing, spec, forms, advice)
    annotation = f'"{advice.text}"' if function is None else function.partition("(")[0].removeprefix("def ")
    before = "" if function is None else f"\n{function}\n\n\n"
    if missing.function is not None:
        samples = _samples(missing.function.function, spec, forms, None if before else advice.text)
        return _of_function(missing, before, f"{annotation}{options}{samples}", forms, advice)
    code = (
        f"import nnscaler\nimport torch\n\n{before}nnscaler.register_op({annotation})(torch.ops.{missing.operator})\n"
    )
    definition = OPDEFS.get("::".join(missing.operator.split(".")[:2]))
    if missing.kind == "aten":
        return Stub(code, "anywhere in the model's file")
    file = None if definition is None else inspect.getsourcefile(definition._init_fn)
    where = f" ({shown(file)})" if file else ""
    return Stub(code, f"in the model's file, after `{missing.operator}` is defined{where}", file)


_CUSTOM = '# its own backward is not the derivative of its forward; gradient="custom" says that this is meant\n'


def _of_function(missing: Missing, before: str, arguments: str, forms: Sequence[Form], advice: Advice) -> Stub:
    assert missing.function is not None
    cls, where = missing.function.function, missing.function.where
    note = _CUSTOM if advice.gradient == "custom" else ""
    types = dict(_types(cls, None if before else advice.text, forms[0].call.call))
    outputs = len(missing.calls[0].outputs)
    if before and outputs > 1:  # an annotation function does not tell how many there are
        types["return"] = f"tuple[{', '.join(['torch.Tensor'] * outputs)}]"
    installed = where is None or is_installed(where.file)
    if where is not None and not installed and not types:
        place = f"above line {where.line} of {shown(where.file)}, `{where.text}`"
        code = f"{before}{note}@nnscaler.register_op({arguments})\n"
        return Stub(code, f"{place} (with `import nnscaler` at the top)", where.file, where.line)
    typed = _typing(cls, types) if types else ""
    imports = "import nnscaler\n" + ("import torch\n" if "torch." in typed + arguments else "")
    if installed and "<" not in cls.__qualname__:
        imports += f"from {cls.__module__} import {cls.__qualname__.partition('.')[0]}\n"
    code = f"{imports}\n{before}{typed}{note}nnscaler.register_op({arguments})({cls.__qualname__})\n"
    if installed or where is None:
        return Stub(code, "in the model's file")
    return Stub(code, f"in {shown(where.file)}, below `{where.text}`", where.file)


def _samples(cls: type[torch.autograd.Function], spec: OperatorSpec, forms: Sequence[Form], text: str | None) -> str:
    """Return the option that gives `verify-op` the calls of `forms`, where the annotation `text` does not say how to
    call the function: an argument that is no tensor and no size has no default. "" where it does, and where a tensor
    holds whole numbers, of which others might not do."""
    given = inspect.signature(cls.forward).parameters
    known = {i.name for i in parse(text).identifiers()} if text else set()
    known |= {name for name, p in given.items() if p.default is not p.empty and p.default is not None}
    drawn = all(p.tensor or p.name in known for p in spec.parameters)
    if drawn or not all(t.is_floating_point() for form in forms for t in form.call.tensors):
        return ""
    calls = [f"({', '.join(map(_written, form.call.call.args))})" for form in forms]
    made = calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]"
    return f", sample_inputs=lambda: {made}"


def _written(value: Any) -> str:
    """Return an argument as code; a floating tensor is one of its shape, with other values."""
    if isinstance(value, TensorArgument):
        dtype = "" if value.dtype == "float32" else f", dtype=torch.{value.dtype}"
        return f"torch.randn({', '.join(map(str, value.shape)) or '()'}{dtype})"
    if isinstance(value, DType):
        return f"torch.{value.name}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return repr(value)


def _typing(cls: type[torch.autograd.Function], types: Mapping[str, str]) -> str:
    listed = ", ".join(f'"{name}": {kind}' for name, kind in types.items())
    return f"{cls.__qualname__}.forward.__annotations__.update({{{listed}}})  # or write the types in its definition\n"


def _types(cls: type[torch.autograd.Function], text: str | None, call: Call) -> Mapping[str, str]:
    """Return the types that registration cannot guess, by parameter. Raises NoStub where forward has no schema."""
    skip = 1 if cls.setup_context is torch.autograd.Function.setup_context else 0
    parameters = list(inspect.signature(cls.forward).parameters.values())[skip:]
    found: dict[str, str] = {}
    untyped = inspect.Parameter.empty
    for p, value in zip(parameters, call.args, strict=False):
        if p.annotation is not untyped or (p.default is not untyped and p.default is not None):
            continue
        kind = _type_of(value)
        if kind not in (None, "torch.Tensor"):
            found[p.name] = str(kind)
    try:
        infer_schema(_typed(cls.forward, found), parse(text) if text else None, skip)
    except SchemaError as error:
        hint = f" ({error.hint})" if error.hint else ""
        raise NoStub(f"its forward has no schema: {error}{hint}") from None
    return found


def _typed(function: Any, types: Mapping[str, str]) -> Any:
    """Return a copy of the function's signature with more types."""

    def prototype() -> None: ...

    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=eval(types[p.name], {"torch": torch})) if p.name in types else p
        for p in signature.parameters.values()
    ]
    prototype.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    prototype.__wrapped__ = function  # type: ignore[attr-defined]
    return prototype


def _type_of(value: Any) -> str | None:
    """Return the type of an argument as it is written in a definition; None where nothing is known of it."""
    if isinstance(value, TensorArgument):
        return "torch.Tensor"
    if isinstance(value, DType):
        return "torch.dtype"
    if isinstance(value, list | tuple):
        inner = _type_of(value[0]) if value else None
        return None if inner is None else f"list[{inner}]"
    return None if value is None else type(value).__name__


def annotation_of(
    missing: Missing, spec: OperatorSpec, forms: Sequence[Form], advice: Advice
) -> str | AnnotationFunction:
    """Return the annotation that the stub registers: a text, or the function that it defines."""
    function = annotation_function(missing, spec, forms, advice)
    if function is None:
        assert advice.text is not None
        return advice.text
    scope: dict[str, Any] = {}
    exec(function, scope)
    made: AnnotationFunction = scope[function.partition("(")[0].removeprefix("def ")]
    return made


def annotation_function(missing: Missing, spec: OperatorSpec, forms: Sequence[Form], advice: Advice) -> str | None:
    """Return the definition of an annotation function, where one text does not do: calls have other texts, or an
    argument such as `dim=` decides, of which other values were not tested. None where the text does."""
    named = [_deciding(spec, form.call.call, text) for form, text in zip(forms, advice.texts, strict=True)]
    names = [p.name for p in spec.parameters if any(p.name in arguments for arguments in named)]
    if advice.text is not None and not names:
        return None
    whole = f"{_opaque(len(spec.parameters))} -> {_opaque(len(missing.calls[0].outputs))}"
    rows: dict[str, str] = {}
    for form, arguments, text in zip(forms, named, advice.texts, strict=True):
        ranks = tuple(t.ndim for t in form.call.call.tensors())
        decided = tuple(arguments.get(n, _default(spec, n)) for n in names)
        rows[repr((ranks, *decided) if advice.text is None else decided)] = text or whole
    positions = [p.name for p in spec.parameters]
    asked = [f'call.get({positions.index(n)}, "{n}", {_default(spec, n)!r})' for n in names]
    if advice.text is None:
        asked.insert(0, "tuple(t.ndim for t in call.tensors())")
    lines = [
        f"def annotation_of_{_identifier(missing.name)}(call):",
        f"    key = ({', '.join(asked)},)",
        "    return {",
    ]
    lines += [f'        {key}: "{text}",' for key, text in rows.items()]
    return "\n".join([*lines, f'    }}.get(key, "{whole}")  # other calls: whole on every rank'])


def _deciding(spec: OperatorSpec, call: Call, text: str | None) -> dict[str, Any]:
    """Return the arguments that may decide what can be split: whole numbers, flags and words that are no identifier's
    size."""
    sizes = {i.name for i in parse(text).identifiers()} if text else set()
    found: dict[str, Any] = {}
    for position, parameter in enumerate(spec.parameters):
        value = call.get(position, parameter.name, parameter.default)
        items = value if isinstance(value, list | tuple) else [value]
        if parameter.name not in sizes and items and all(isinstance(i, int | str) for i in items):
            found[parameter.name] = tuple(items) if isinstance(value, list | tuple) else value
    return found


def _default(spec: OperatorSpec, name: str) -> Any:
    return next(p.default for p in spec.parameters if p.name == name)


def _opaque(count: int) -> str:
    return ", ".join("?" * count)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.removesuffix(".default").rpartition(".")[2])
