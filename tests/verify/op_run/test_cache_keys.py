"""Keys change with things that operators do not name: attributes of values, torch's flags, patches, files."""

from __future__ import annotations

import builtins
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verify.op_run.test_cache import load
from verify.evidence.inputs.find_operator import record_of
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run.ambient_state_in_fingerprint import flags
from verify.operators.run.cache import Cache, key_of
from verify.operators.run.file_and_process_reads import outside_reads
from verify.operators.run.fingerprint import Opaque
from verify.operators.run.job import Job, make_job
from verify.operators.run.verify_many import PoolSettings, run_many

HEAD = """
import collections, dataclasses, enum, functools, math, re, sys, types, typing
import torch
from torch.nn import functional as F
"""
OPERATOR = "def operator(x):\n    return x * 2 if {} else x.softmax(-1)\n"
# a definition, how the operator uses it, and what is changed in the definition
PLANTED = [
    ("class V(typing.NamedTuple):\n    n: int = 1\n    def right(self): return 1\nv = V()", "v.right()", "return 1"),
    ("class V(enum.Enum):\n    A = 1\n    def right(self): return 1\nv = V.A", "v.right()", "return 1"),
    ("class V(int):\n    def right(self): return 1\nv = V(3)", "v.right()", "return 1"),
    ("class V(str): pass\nv = V('a'); v.right = 1", "v.right", "right = 1"),
    ("class V(dict):\n    def right(self): return 1\nv = V()", "v.right()", "return 1"),
    ("class V(dict): pass\nv = V(); v.right = 1", "v.right", "right = 1"),
    ("class V(list):\n    def right(self): return 1\nv = V()", "v.right()", "return 1"),
    ("class V(set):\n    def right(self): return 1\nv = V()", "v.right()", "return 1"),
    ("class V(collections.UserDict):\n    def right(self): return 1\nv = V()", "v.right()", "return 1"),
    ("class V(collections.Counter):\n    def right(self): return 1\nv = V()", "v.right()", "return 1"),
    ("class V(functools.partial):\n    def right(self): return 1\nv = V(len)", "v.right()", "return 1"),
    ("v = collections.defaultdict(lambda: 1)", "v['k']", ": 1"),
    ("class U: __slots__ = ('right',)\nclass V(U): pass\nv = V(); v.right = 1", "v.right", "right = 1"),
    ("@dataclasses.dataclass\nclass V:\n    n: int = 0\nv = V(); v.right = 1", "v.right", "right = 1"),
    (
        "@dataclasses.dataclass\nclass V:\n    n: int = 0\n    def right(self): return 1\nv = V()",
        "v.right()",
        "return 1",
    ),
    (
        "class V(torch.Tensor):\n    def right(self): return 1\nv = torch.ones(2).as_subclass(V)",
        "v.right()",
        "return 1",
    ),
    ("v = torch.ones(2); v.right = 1", "v.right", "right = 1"),
    ("v = [0, 1].__len__", "v() == 2", "[0, 1]"),
    ("v = {'k': 1}.get", "v('k')", ": 1"),
    ("v = re.compile('a' * 300 + '1')", "v.match('a')", "+ '1'"),
    ("class V:\n    @functools.cached_property\n    def right(self): return 1\nv = V()", "v.right", "return 1"),
    ("def v(y: 1 = 0): return y", "v()", ": 1"),
]


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    yield
    for name in ("user_ops", "planted_helper"):
        sys.modules.pop(name, None)


def key(tmp_path: Path, source: str) -> str:
    return key_of(job(tmp_path, source), OpOptions())


def job(tmp_path: Path, source: str) -> Job:
    spec = record_of(load("user_ops", HEAD + source, tmp_path).operator)
    assert spec is not None
    return make_job(spec, "a b -> a b")


@pytest.mark.parametrize(("definition", "use", "old"), PLANTED)
def test_a_change_within_a_value_misses(definition: str, use: str, old: str, tmp_path: Path) -> None:
    assert definition.count(old) == 1
    source = f"{definition}\n{OPERATOR.format(use)}"
    before = key(tmp_path, source)
    assert key(tmp_path, source) == before
    assert key(tmp_path, source.replace(old, old.replace("1", "2"))) != before


def test_what_is_outside_of_a_try_misses(tmp_path: Path) -> None:
    head, caught = "def operator(x):\n    try:\n        y = x + 0\n", "    except ValueError:\n        z = x\n"
    inside = f"{head}        z = y.checked()\n{caught}    return z\n"
    outside = f"{head}{caught}    else:\n        z = y.checked()\n    return z\n"
    assert key(tmp_path, inside) != key(tmp_path, outside)


def patched(amount: int) -> Any:
    return load("planted_patches", f"AMOUNT = {amount}\ndef own(x, *_, **__): return x * AMOUNT\n", Path.cwd()).own


def of_class(amount: int) -> Any:
    class Own:
        def __init__(self) -> None:
            self.amount = amount

        def __call__(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
            return x * self.amount

    return Own()


def swapped(amount: int) -> Any:
    return torch.neg if amount == 1 else torch.exp


PATCHES: list[tuple[Any, str, Callable[[int], Any], str]] = [
    (torch, "softmax", of_class, "torch.softmax(x, -1)"),
    (torch, "softmax", lambda n: functools.partial(patched(n)), "torch.softmax(x, -1)"),
    (torch, "softmax", swapped, "torch.softmax(x)"),
    (torch, "own", lambda n: n, "torch.own"),
    (torch, "layer_norm", patched, "F.layer_norm(x, (3,))"),
    (torch, "layer_norm", swapped, "F.layer_norm(x, (3,))"),
    (torch.nn.functional, "relu", patched, "torch.nn.ReLU()(x)"),
    (torch.nn.Softmax, "forward", patched, "torch.nn.Softmax(-1)(x)"),
    (torch.Tensor, "own", lambda n: property(patched(n)), "x.own"),
    (torch.Tensor, "own", lambda n: functools.partialmethod(patched(n)), "x.own()"),
    (torch.Tensor, "own", lambda n: n, "x.own"),
    (builtins, "own", lambda n: n, "own"),
    (builtins, "own", of_class, "own(x)"),
    (sys.modules["math"], "pi", lambda n: n, "math.pi"),
    (sys, "own", lambda n: n, "sys.own"),
]


@pytest.mark.parametrize(("owner", "name", "make", "use"), PATCHES)
def test_what_is_put_into_torch_misses(
    owner: Any, name: str, make: Any, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [key(tmp_path, OPERATOR.format(use))]
    for amount in (1, 2, 1):
        monkeypatch.setattr(owner, name, make(amount), raising=False)
        keys.append(key(tmp_path, OPERATOR.format(use)))
    assert len(set(keys)) == 3 and keys[1] == keys[3]


def test_hooks_of_all_modules_miss(tmp_path: Path) -> None:
    keys = [key(tmp_path, "v = torch.nn.ReLU()\ndef operator(x):\n    return v(x)\n")]
    for amount in (1, 2):
        hook = load("planted_hook", f"def hook(m, i, o): return o * {amount}\n", tmp_path).hook
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        keys.append(key(tmp_path, "v = torch.nn.ReLU()\ndef operator(x):\n    return v(x)\n"))
        handle.remove()
    assert len(set(keys)) == 3


SETTINGS: list[tuple[Callable[[Any], object], Any, Any]] = [
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.use_deterministic_algorithms, True, False),
    (torch.set_float32_matmul_precision, "high", "highest"),
    (lambda on: setattr(torch.backends.cudnn, "benchmark", on), True, False),
    (lambda on: torch.set_autocast_enabled("cpu", on), True, False),
    (torch.set_default_device, "cpu", None),
]


@pytest.mark.parametrize(("set_", "value", "usual"), SETTINGS)
def test_settings_of_torch_miss(set_: Callable[[Any], object], value: Any, usual: Any, tmp_path: Path) -> None:
    before = key(tmp_path, OPERATOR.format(True))
    set_(value)
    try:
        assert key(tmp_path, OPERATOR.format(True)) != before
    finally:
        set_(usual)
    assert key(tmp_path, OPERATOR.format(True)) == before
    assert len(flags()) > 20


def test_a_kernel_for_an_operator_of_torch_has_no_key(tmp_path: Path) -> None:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("relu", lambda x: x.clamp(min=0), "AutogradCPU")
        with pytest.raises(Opaque, match="registered for aten::relu"):
            key(tmp_path, OPERATOR.format(True))
    finally:
        library._destroy()
    assert key(tmp_path, OPERATOR.format(True))


def test_a_second_kernel_of_an_own_operator_has_no_key(tmp_path: Path) -> None:
    source = (
        "@torch.library.custom_op('cache_keys::own', mutates_args=())\n"
        "def own(x: torch.Tensor) -> torch.Tensor:\n    return x * 3\n"
        "def operator(x):\n    return torch.ops.cache_keys.own(x)\n"
    )
    found = job(tmp_path, source)
    assert key_of(found, OpOptions())
    library = torch.library.Library("cache_keys", "IMPL")
    library.impl("own", lambda x: x.relu(), "CPU")
    with pytest.raises(Opaque, match="kernels of cache_keys::own"):
        key_of(found, OpOptions())
    library._destroy()


def test_a_submodule_of_an_installed_package_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "planted_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from planted_package.core import right\n")
    monkeypatch.syspath_prepend(str(package.parent))
    keys = []
    for amount in (1, 2):
        (package / "core.py").write_text(
            f"def right():\n    return {amount}{'' if amount == 1 else '  # other size'}\n"
        )
        for name in [name for name in sys.modules if name.startswith("planted_package")]:
            monkeypatch.delitem(sys.modules, name)
        keys.append(key(tmp_path, f"import planted_package\n{OPERATOR.format('planted_package.right()')}"))
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    "use",
    [
        "__import__('os').path.exists('t')",
        "np.genfromtxt('t')",
        "os.path.getsize('t')",
        "exists('t')",
        "subprocess.run(['true'])",
        "linecache.getline('t', 1)",
        "torch.from_file('t')",
        "sys.modules['t'].right",
        "lines('t')",
    ],
)
def test_what_reads_has_no_key(use: str, tmp_path: Path) -> None:
    head = (
        "import linecache, os, subprocess\nimport numpy as np\n"
        "from os.path import exists\nfrom linecache import getlines as lines\n"
    )
    with pytest.raises(Opaque):
        key(tmp_path, head + OPERATOR.format(use))
    assert key(tmp_path, head + OPERATOR.format("os.path.join('a', 'b')"))


READERS = {
    "a package that opens": "__import__('numpy').lib.npyio.DataSource().open(FILE).close()",
    "a number": "os.close(getattr(os, 'op' + 'en')(FILE, 0))",
    "a process": "getattr(subprocess, 'r' + 'un')(['true'], check=True)",
    "a folder": "os.listdir(FOLDER)",
}


@pytest.mark.parametrize("reads", READERS.values(), ids=READERS)
def test_what_is_read_while_an_operator_runs_is_noticed(reads: str, tmp_path: Path) -> None:
    scope: dict[str, Any] = {"os": os, "subprocess": subprocess, "FILE": __file__, "FOLDER": str(tmp_path)}
    source = f"def operator(x):\n    {reads}\n    return x\n"
    exec(compile(source, str(tmp_path / "user_ops.py"), "exec"), scope)
    with outside_reads() as found:
        scope["operator"](1)
    assert found
    del found[:]
    scope["operator"](1)
    assert not found


def test_what_is_no_reading_is_not_noticed(tmp_path: Path) -> None:
    """A module reads when it is imported, and has a value; warnings show a line of source; results may be written."""
    (tmp_path / "planted_helper.py").write_text(f"TEXT = open({__file__!r}).read()\n")
    scope: dict[str, Any] = {}
    source = (
        "import sys, warnings, torch\n"
        "def operator(x):\n"
        "    import planted_helper\n    import colorsys\n    warnings.warn('careful')\n"
        "    return torch.compile(lambda y: y + 1, backend='eager')(x)\n"
    )
    exec(compile(source, str(tmp_path / "user_ops.py"), "exec"), scope)
    sys.path.insert(0, str(tmp_path))
    try:
        with outside_reads() as found, pytest.warns(UserWarning):
            scope["operator"](torch.ones(2))
            (tmp_path / "written").write_text("")
    finally:
        sys.path.remove(str(tmp_path))
    assert not found


@pytest.mark.parametrize("isolate", [True, False])
def test_a_pass_of_an_operator_that_reads_is_not_kept(isolate: bool, tmp_path: Path) -> None:
    """Under whatever name: the same code, and another function under it."""
    (tmp_path / "t.txt").write_text("2")
    kept = []
    for function in ("genfromtxt", "char.upper"):
        source = f"import numpy as np\nread = np.{function}\ndef operator(x):\n    read(FILE)\n    return x * 2\n"
        planted = job(tmp_path, f"FILE = {str(tmp_path / 't.txt')!r}\n{source}")
        settings = PoolSettings(workers=1, isolate=isolate, cache=Cache(tmp_path / function / "v"))
        (result,) = run_many([planted], OpOptions(cases=4, prove=False), settings)
        assert result.report.verdict.passes
        assert bool(result.remark) is (function == "genfromtxt"), result.remark
        kept.append(len(list((tmp_path / function).rglob("*.json"))))
    assert kept == [0, 1]


def test_keys_are_the_same_in_another_process(tmp_path: Path) -> None:
    makers = [
        f"def make{i}():\n    {definition.replace(chr(10), chr(10) + '    ')}\n    return v"
        for i, (definition, *_) in enumerate(PLANTED)
    ]
    values = f"VALUES = [{', '.join(f'make{i}()' for i in range(len(PLANTED)))}]"
    used = OPERATOR.format("VALUES and F.relu(x).own and math.pi and torch.float32 and torch.nn.init")
    (tmp_path / "user_ops.py").write_text("\n".join((HEAD, *makers, values, used)))
    script = (
        "import user_ops\nfrom verify.evidence.inputs.find_operator import record_of\n"
        "from verify.evidence.verify_op_options import OpOptions\nfrom verify.operators.run.cache import key_of\n"
        "from verify.operators.run.job import make_job\n"
        "print(key_of(make_job(record_of(user_ops.operator), 'a b -> a b'), OpOptions()))\n"
    )
    keys = set()
    for seed, more in (("1", ""), ("2", "import torch._dynamo, torch.testing, torch.fft, inspect\n")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONHASHSEED": seed}
        run = [sys.executable, "-c", more + script]
        done = subprocess.run(run, check=False, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout.strip())
    assert len(keys) == 1 and len(keys.pop()) == 40
