"""The pytest plugin: `verify_op`, `verify_plan` and `verify_external` as fixtures, a marker for models, and the gate as
test items.

    def test_my_op(verify_op):
        verify_op("my_ops.py::my_op")

    @pytest.mark.nnscaler_plan(ranks=8, plan="dp=2,tp=2,pp=2")
    def test_model():
        return "model.py"            # or (module or factory, inputs)

    def test_fsdp(verify_external):
        verify_external("check.py", ranks=4)

    pytest --nnscaler-gate           # each item of [tool.nnscaler.gate] is a test

pytest loads it in every run of everybody who has installed nnscaler. So it imports nothing of ours, and not torch,
until one of these is used: a project may have a `verify.py` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nnscaler.cli.pytest_assertions import Gate

MARKER = "nnscaler_plan"
_OPTION = "--nnscaler-gate"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--nnscaler-gate`."""
    group = parser.getgroup("nnscaler")
    group.addoption(
        _OPTION, action="store_true", help="run each item of [tool.nnscaler.gate] in pyproject.toml as a test"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the marker."""
    text = f"{MARKER}(ranks=2, plan=None, **options): the function returns a model file, or (module, inputs), to verify"
    config.addinivalue_line("markers", text)


@pytest.fixture
def verify_op() -> Callable[..., Any]:
    """A function that verifies an operator and fails the test unless it passes; takes what `verify.verify_op` does, and
    returns its report."""
    return lambda operator, **options: _tool().check_op(operator, **options)


@pytest.fixture
def verify_plan(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function that verifies a model and fails the test unless it passes.

    Takes a model file (`model.py` or `model.py::factory`), or a module (or a function that makes one) and its inputs;
    and the options of `verify.verify_plan`, for which the marker gives defaults.
    """
    item = request.node
    marker = item.get_closest_marker(MARKER)
    given = {} if marker is None else dict(marker.kwargs)

    def check(model: Any, inputs: Any = None, **options: Any) -> Any:
        report = _tool().check_plan(model, inputs, **{"ranks": 2, **given, **options})
        item.stash[_VERIFIED] = True
        return report

    return check


@pytest.fixture
def verify_external() -> Callable[..., Any]:
    """Return a function that verifies a parallel program of the project and fails the test unless it passes.

    Takes what `verify.verify_external` does: a check file and the options of `nnscaler verify-external`; returns the
    report.
    """
    return lambda program, **options: _tool().check_external(program, **options)


_VERIFIED: pytest.StashKey[bool] = pytest.StashKey()  # of an item in which a plan was verified


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test with the marker in which nothing was verified, whatever kind of test it is."""
    result = yield
    if item.get_closest_marker(MARKER) is not None and not item.stash.get(_VERIFIED, False):
        text = "nothing was verified: return a model file, or (module, inputs), from a function that is no method of a"
        pytest.fail(f"{item.name}: {text} unittest.TestCase, or call verify_plan in it", pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a function with the marker, and verify its result."""
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    returned = pyfuncitem.obj(**arguments)
    if returned is not None:
        model, inputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        _tool().check_plan(model, inputs, **{"ranks": 2, **marker.kwargs})
        pyfuncitem.stash[_VERIFIED] = True
    return True


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the gate's items, after all others."""
    if config.getoption(_OPTION):
        items += list(_gate_items(session))


def _gate_items(session: pytest.Session) -> Iterator[pytest.Item]:
    gate = _tool(pytest.UsageError).open_gate()
    for name in gate.names:
        yield GateItem.from_parent(session, name=name, nodeid=f"nnscaler-gate::{name}", gate=gate)


class GateItem(pytest.Item):
    """One item of the gate. Its report is kept in the test's properties, and shown where it fails."""

    def __init__(self, *, gate: Gate, **rest: Any) -> None:
        super().__init__(**rest)
        self._gate = gate

    def runtest(self) -> None:
        """Verify the item. Raises CheckFailed with the report, unless it passes or its findings are known."""
        for name, value in self._gate.run(self.name).items():
            self.user_properties.append((name, value))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the report; pytest's own representation of anything else."""
        if excinfo.type.__name__ == "CheckFailed":
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the settings' file, and the item."""
        return self._gate.file, None, f"nnscaler gate: {self.name}"


def _tool(kind: Callable[[str], BaseException] = pytest.fail.Exception) -> Any:
    """Return the module that does the work; importing it imports torch.

    Raises `kind` where `verify` is somebody else's.
    """
    from nnscaler.cli.own_packages_shadowed import wrong_package

    problem = wrong_package()
    if problem is not None:
        raise kind(f"nnscaler cannot verify anything in this process: {problem}")

    from nnscaler.cli import pytest_assertions

    return pytest_assertions
