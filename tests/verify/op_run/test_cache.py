"""The cache of passes: what hits, and that everything that a result depends on misses when it changes."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec

from verify.child_processes import Note
from verify.evidence.inputs.find_operator import record_of
from verify.evidence.verify_op_options import OpOptions, Safeguards
from verify.operators.run import cache as cache_module
from verify.operators.run.cache import CACHED, Cache, key_of
from verify.operators.run.fingerprint import Opaque, fingerprint
from verify.operators.run.job import Job, make_job
from verify.operators.run.verify_many import PoolSettings, run_many
from verify.results.finding import Finding
from verify.results.report import Check, Report
from verify.results.verdict import Verdict

SOURCE = """
import functools
import math
import torch
import helper_module
from torch import Tensor
from torch.nn import functional as F

SCALE = 2.0
TABLE = {"a": [1, 2], "b": (3, 4)}
WEIGHT = torch.arange(4.0)

class Settings:
    def __init__(self, factor):
        self.factor = factor

SETTINGS = Settings(3)

def inner(x):
    return x * 5

def helper(x):
    return inner(x) + 1

@functools.cache
def constant():
    return 7

def operator(x: Tensor, bias: float = 0.5, *, extra: int = 2) -> Tensor:
    def nested(y):
        return y * 11
    x = F.relu(helper(x)) * SCALE + bias + extra + math.sqrt(4) + constant()
    x = nested(x) * SETTINGS.factor + TABLE["a"][0] + WEIGHT.sum()
    return helper_module.shift(x)

def make(factor):
    def made(x: Tensor) -> Tensor:
        return x * factor
    return made

made = make(2)

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2

def sample_inputs():
    return (torch.ones(4, 6),)

def annotation(call):
    return "a b -> a b"
"""
HELPER = "AMOUNT = 1\n\ndef shift(x):\n    return x + AMOUNT\n"


@pytest.fixture(autouse=True)
def helper_module(tmp_path: Path) -> Iterator[None]:
    yield
    sys.modules.pop("helper_module", None)


def load(name: str, source: str, tmp_path: Path) -> types.ModuleType:
    """A module as a new process would have it: always the same name and file."""
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module


def job(tmp_path: Path, name: str = "operator", source: str = SOURCE, helper: str = HELPER, **changes: Any) -> Job:
    load("helper_module", helper, tmp_path)
    module = load("user_ops", source, tmp_path)
    spec = record_of(getattr(module, name))
    assert spec is not None
    found = make_job(spec, "a b -> a b")
    more = {key: getattr(module, value) if isinstance(value, str) else value for key, value in changes.items()}
    return replace(found, spec=replace(found.spec, **more)) if more else found


def test_nothing_changed(tmp_path: Path) -> None:
    for name in ("operator", "made", "Function"):
        assert key_of(job(tmp_path, name), OpOptions()) == key_of(job(tmp_path, name), OpOptions())


def test_comments_and_other_functions_do_not_matter(tmp_path: Path) -> None:
    before = key_of(job(tmp_path), OpOptions())
    changed = SOURCE.replace("    return inner(x) + 1", "    # why\n    return inner(x) + 1\n\ndef unused():\n    pass")
    assert key_of(job(tmp_path, source=changed), OpOptions()) == before


PLANTED = [
    ("operator", "body", "+ bias + extra", "- bias + extra"),
    ("operator", "constant of the body", "math.sqrt(4)", "math.sqrt(9)"),
    ("operator", "what the body calls", "F.relu", "F.gelu"),
    ("operator", "default", "bias: float = 0.5", "bias: float = 0.25"),
    ("operator", "keyword default", "extra: int = 2", "extra: int = 3"),
    ("operator", "nested function", "return y * 11", "return y * 12"),
    ("operator", "global constant", "SCALE = 2.0", "SCALE = 2.5"),
    ("operator", "global table", '"a": [1, 2]', '"a": [9, 2]'),
    ("operator", "global tensor", "torch.arange(4.0)", "torch.arange(1.0, 5.0)"),
    ("operator", "attribute of a global", "Settings(3)", "Settings(4)"),
    ("operator", "class of a global", "self.factor = factor", "self.factor = factor + 1"),
    ("operator", "helper", "return inner(x) + 1", "return inner(x) + 2"),
    ("operator", "helper of a helper", "return x * 5", "return x * 6"),
    ("operator", "cached function", "return 7", "return 8"),
    ("made", "closure value", "made = make(2)", "made = make(3)"),
    (
        "Function",
        "forward",
        "    def forward(ctx, x):\n        return x * 2",
        "    def forward(ctx, x):\n        return x * 4",
    ),
    ("Function", "backward", "return g * 2", "return g * 3"),
]


@pytest.mark.parametrize(("name", "what", "old", "new"), PLANTED, ids=[f"{p[0]}-{p[1]}" for p in PLANTED])
def test_a_planted_change_misses(name: str, what: str, old: str, new: str, tmp_path: Path) -> None:
    assert SOURCE.count(old) == 1, what
    before = key_of(job(tmp_path, name), OpOptions())
    assert key_of(job(tmp_path, name, SOURCE.replace(old, new)), OpOptions()) != before


@pytest.mark.parametrize(("old", "new"), [("return x + AMOUNT", "return x - AMOUNT"), ("AMOUNT = 1", "AMOUNT = 2")])
def test_a_change_in_another_module_misses(old: str, new: str, tmp_path: Path) -> None:
    before = key_of(job(tmp_path), OpOptions())
    assert key_of(job(tmp_path, helper=HELPER.replace(old, new)), OpOptions()) != before


def test_a_value_set_from_outside_misses(tmp_path: Path) -> None:
    """Same sources, another value: what a program sets from its environment, say."""
    found = job(tmp_path)
    before = key_of(found, OpOptions())
    sys.modules["helper_module"].AMOUNT = 9  # type: ignore[attr-defined]
    assert key_of(found, OpOptions()) != before


@pytest.mark.parametrize("owner", [torch, torch.nn.functional, torch.Tensor])
def test_what_is_put_into_torch_is_looked_into(owner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "def operator(x):\n    return torch.own(F.own(x)).own()\n"
    keys = []
    for amount in (1, 2):
        patches = load("patches", f"AMOUNT = {amount}\ndef own(x):\n    return x * AMOUNT\n", tmp_path)
        monkeypatch.setattr(owner, "own", patches.own, raising=False)
        source = f"import torch\nfrom torch.nn import functional as F\n{body}"
        keys.append(key_of(job(tmp_path, source=source), OpOptions()))
    assert keys[0] != keys[1]


def test_what_belongs_to_the_record_misses(tmp_path: Path) -> None:
    plain = key_of(job(tmp_path), OpOptions())
    sampled = key_of(job(tmp_path, sample_inputs="sample_inputs"), OpOptions())
    other = SOURCE.replace("torch.ones(4, 6)", "torch.ones(4, 8)")
    resampled = key_of(job(tmp_path, source=other, sample_inputs="sample_inputs"), OpOptions())
    computed = key_of(job(tmp_path, annotation="annotation"), OpOptions())
    other = SOURCE.replace('return "a b -> a b"', 'return "a b^ -> a b^"')
    recomputed = key_of(job(tmp_path, source=other, annotation="annotation"), OpOptions())
    linear = key_of(job(tmp_path, linear=(frozenset({0}),)), OpOptions())
    custom = key_of(replace(job(tmp_path), spec=replace(job(tmp_path).spec, gradient="custom")), OpOptions())
    keys = [plain, sampled, resampled, computed, recomputed, linear, custom]
    assert len(set(keys)) == len(keys)


def test_another_annotation_or_option_misses(tmp_path: Path) -> None:
    found = job(tmp_path)
    other = make_job(found.spec, "a b^ -> a b^")
    keys = [
        key_of(found, OpOptions()),
        key_of(other, OpOptions()),
        key_of(found, OpOptions(seed=1)),
        key_of(found, OpOptions(cases=5)),
        key_of(found, OpOptions(prove=False)),
        key_of(found, OpOptions(safeguards=Safeguards(pairs=False))),
        key_of(found, OpOptions(), "verify_deep"),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(found, OpOptions(timeout=1.0)) == keys[0]  # a pass is a pass


def test_versions_and_our_own_source_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = job(tmp_path)
    keys = [key_of(found, OpOptions())]
    monkeypatch.setattr(cache_module, "environment", lambda: {"nnscaler": "0.1.0", "torch": "another"})
    keys.append(key_of(found, OpOptions()))
    monkeypatch.setattr(cache_module, "_sources", lambda: "changed")
    keys.append(key_of(found, OpOptions()))
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import not_yet_imported\n    return x", "not_yet_imported"),
        ("return x + LOCK", "LOCK"),
        ("return torch.ops.run_nowhere.thing(x)", ""),
    ],
)
def test_what_cannot_be_seen_has_no_key(body: str, said: str, tmp_path: Path) -> None:
    import threading

    module = load("user_ops", f"import torch\n\ndef operator(x):\n    {body}\n", tmp_path)
    module.LOCK = threading.Lock()  # type: ignore[attr-defined]
    spec = record_of(module.operator)
    assert spec is not None
    if said:
        with pytest.raises(Opaque):
            key_of(make_job(spec, "a -> a"), OpOptions())
    else:
        assert key_of(make_job(spec, "a -> a"), OpOptions())


def test_kernels_that_are_not_python_have_no_key() -> None:
    torch.library.define("run_cache_test::compiled", "(Tensor x) -> Tensor")
    with pytest.raises(Opaque, match="kernels of run_cache_test"):
        fingerprint(torch.ops.run_cache_test.compiled.default)
    assert fingerprint(torch.ops.aten.relu.default) != fingerprint(torch.ops.aten.gelu.default)


@pytest.mark.parametrize(
    ("head", "call"),
    [("", "torch.ops.SPACE.triple"), ("ops = torch.ops", "ops.SPACE.triple"), ("lib = torch.ops.SPACE", "lib.triple")],
)
def test_an_operator_of_torch_library_is_looked_into(head: str, call: str, tmp_path: Path) -> None:
    """Its kernel is what runs, however the code reaches it."""
    space = f"run_cache_{len(head + call)}"
    source = (
        f"import torch\n{head}\n@torch.library.custom_op('SPACE::triple', mutates_args=())\n"
        f"def triple(x: torch.Tensor) -> torch.Tensor:\n    return x * 3\n\ndef operator(x):\n    return {call}(x)\n"
    )
    spec = record_of(load("user_ops", source.replace("SPACE", space), tmp_path).operator)
    assert spec is not None
    before = fingerprint(spec.target)
    assert fingerprint(spec.target) == before
    torch._library.custom_ops.OPDEFS[f"{space}::triple"]._init_fn = lambda x: x  # another kernel
    assert fingerprint(spec.target) != before


def test_built_in_operators_have_keys() -> None:
    from op_registry.builtin import SPECS

    keys = {key_of(Job(spec, spec.name), OpOptions()) for spec in SPECS}
    assert len(keys) == len(SPECS)


def test_values_that_look_alike() -> None:
    different: list[Any] = [1, 1.0, True, "1", b"1", [1], (1,), {1}, {1: 1}, None, [], (), {}, [[1], []], [[], [1]]]
    assert len({fingerprint(value) for value in different}) == len(different)
    assert fingerprint({"b", "a", "c"}) == fingerprint({"c", "b", "a"})
    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)


def passed(verdict: Verdict = Verdict.PROVED_ALL_SIZES, findings: tuple[Finding, ...] = ()) -> Report:
    checks = (
        Check("whole operator", Verdict.TESTED_EXACT, 1, detail="fits", supporting=True),
        Check("split `a`", verdict, 3, int(verdict is Verdict.REFUTED), 0.25),
    )
    return Report("verify-op", "f", "`a -> a`", 3, checks, findings, ("a note",), {"torch": "2"}, 1.5)


def test_a_pass_comes_back_as_it_was(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache" / "verify_op")
    cache.store("key", passed())
    assert cache.load("key") == replace(passed(), notes=("a note", CACHED))
    assert cache.load("other") is None
    assert (tmp_path / "cache" / ".gitignore").read_text() == "*\n"
    assert (tmp_path / "cache" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


@pytest.mark.parametrize(
    "report",
    [passed(Verdict.REFUTED), passed(Verdict.INCONCLUSIVE), passed(findings=(Finding("code", "message"),))],
)
def test_only_passes_are_kept(report: Report, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache" / "verify_op")
    cache.store("key", report)
    assert cache.load("key") is None and not list(tmp_path.rglob("*.json"))


def test_entries_that_are_not_what_was_written_are_ignored(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache" / "verify_op")
    cache.store("key", passed())
    (file,) = cache.folder.glob("*.json")
    right = json.loads(file.read_text())
    wrong: list[Any] = [
        "",
        "[]",
        "{}",
        file.read_text()[:100],
        json.dumps({**right, "level": "TESTED (exact)"}),
        json.dumps({**right, "findings": [{"code": "annotation_wrong"}]}),
        json.dumps({**right, "checks": []}),
        json.dumps({**right, "checks": [{**right["checks"][1], "verdict": "REFUTED"}]}),
        json.dumps({**right, "unknown": 1}),
    ]
    for text in wrong:
        file.write_text(text)
        assert cache.load("key") is None, text
    file.write_text(json.dumps(right))
    assert cache.load("key") is not None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Cache(tmp_path / "file" / "verify_op").store("key", passed())


def test_old_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache" / "verify_op")
    monkeypatch.setattr(cache_module, "KEPT", 4)
    for number in range(4):
        cache.store(str(number), passed())
    cache.prune()
    assert len(list(cache.folder.glob("*.json"))) == 4
    cache.store("5", passed())
    cache.prune()
    assert len(list(cache.folder.glob("*.json"))) == 3 and cache.load("5") is not None


def test_a_second_run_is_cached_and_a_changed_one_is_not(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache" / "verify_op")
    ran: list[str] = []

    def verify(job: Job, options: OpOptions, reproduce: object, note: Note) -> Report:
        ran.append(job.spec.name)
        return passed()

    settings = PoolSettings(isolate=False, cache=cache, verify=verify)  # type: ignore[arg-type]

    def run(source: str) -> list[bool]:
        jobs = [job(tmp_path, "operator", source), job(tmp_path, "made", source)]
        return [result.cached for result in run_many(jobs, OpOptions(), settings)]

    assert run(SOURCE) == [False, False]
    assert run(SOURCE) == [True, True] and len(ran) == 2
    assert sorted(run(SOURCE.replace("SCALE = 2.0", "SCALE = 3.0"))) == [False, True] and ran[2:] == ["operator"]


def test_why_something_is_not_cached(tmp_path: Path) -> None:
    torch.library.define("run_cache_test::remark", "(Tensor x) -> Tensor")
    spec = OperatorSpec("remark", "a -> a", target=torch.ops.run_cache_test.remark.default)
    settings = PoolSettings(isolate=False, cache=Cache(tmp_path / "c" / "v"), verify=lambda *_: passed())
    (result,) = run_many([Job(spec, None)], OpOptions(), settings)
    assert "kernels of run_cache_test.remark.default" in result.remark and not list(tmp_path.rglob("*.json"))


def test_proofs_that_were_cut_short_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = default_registry().lookup("aten.relu.default")
    assert spec is not None

    def verified() -> Report:
        settings = PoolSettings(isolate=False, cache=Cache(tmp_path / "cache"))
        (result,) = run_many([make_job(spec)], OpOptions(cases=6), settings)
        return result.report

    with monkeypatch.context() as patch:
        patch.setattr("verify.operators.all_checks.PROOF_SHARE", -1.0)
        assert verified().verdict is Verdict.TESTED_EXACT
    assert verified().verdict is Verdict.PROVED_ALL_SIZES
    assert CACHED in verified().notes
