"""Settings of every test: one thread per process, fixed hypothesis examples, and the slowest tests first."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from verify.child_processes import can_run_apart as CAN_RUN_APART

if TYPE_CHECKING:
    from nnscaler.runtime.jobs.launcher import ForkServer
    from tests.traced_once import TracedOnce

# Nothing is kept in the home of whoever runs the tests.
_CACHES = tempfile.TemporaryDirectory(prefix="nnscaler-caches-")
os.environ["XDG_CACHE_HOME"] = _CACHES.name

_NUMBERS = itertools.count()

# Workers of `pytest -n auto` already use every core.
torch.set_num_threads(1)

# The same examples on every machine; a time limit per example would fail on a busy one.
hypothesis.settings.register_profile(
    "nnscaler", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("nnscaler")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A worker for each core that this process may use. One more would compute while others wait for processes, and
    import and trace everything once more, which takes longer."""
    return len(os.sched_getaffinity(0))


def pytest_collection(session: pytest.Session) -> None:
    """Let each worker begin to import the tests at another one: what one has compiled, the others find. Else each would
    compile all of them at the same time."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker is None or session.config.args != list(session.config.getini("testpaths")):
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * int(worker.removeprefix("gw")) // workers
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception):  # collection tells what is wrong with it
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts under tests/text/ anew")


def long_rows() -> list[str]:
    """Return the tests of `long_rows.txt`, as pytest names them below this folder."""
    lines = Path(__file__).with_name("long_rows.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `long_rows.txt`, and moves those marked `early` to the front, for a long test that starts last
    would run alone at the end."""
    long = {f"tests/{row}" for row in long_rows()}
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


def pytest_collection_finish() -> None:
    """Takes out of garbage collection what was made by imports and collection, and collects less often: to walk through
    torch and all tests again and again would take a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def _simulator_in_this_process() -> Iterator[pytest.MonkeyPatch]:
    """A child process for every run on the simulator would make the suite a fifth longer. Tests marked `apart` have
    one, and so have all commands that run as processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verify.child_processes.can_run_apart", lambda: False)
        yield patch


class SharedServer:
    """Hands out one fork server to all, which is started at the first call."""

    def __init__(self, start: Callable[[], ForkServer], stack: contextlib.ExitStack) -> None:
        self.start, self._stack = start, stack
        self._server: ForkServer | None = None

    def __call__(self) -> contextlib.nullcontext[ForkServer]:
        if self._server is None or self._server._process.poll() is not None:
            self._server = self._stack.enter_context(self.start())
        return contextlib.nullcontext(self._server)


@pytest.fixture(autouse=True, scope="session")
def _one_fork_server() -> Iterator[SharedServer | None]:
    """Processes of all tests start from one server: what it imports takes longer than most that they do. Tests marked
    `apart` start servers of their own, and so do all commands that run as processes."""
    backends = sys.modules.get("verify.programs.execution.run_on_backend")
    if backends is None:  # no test that was collected runs programs
        yield None
        return
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        server = SharedServer(backends.start_server, stack)
        patch.setattr(backends, "start_server", server)
        yield server


@pytest.fixture(autouse=True)
def _apart(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _one_fork_server: SharedServer | None
) -> None:
    if request.node.get_closest_marker("apart") is not None:
        monkeypatch.setattr("verify.child_processes.can_run_apart", CAN_RUN_APART)
        if _one_fork_server is not None:
            monkeypatch.setattr("verify.programs.execution.run_on_backend.start_server", _one_fork_server.start)


@pytest.fixture(autouse=True)
def _cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one left. (Tests that run in the repository share its cache: `[tool.nnscaler]`.)"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(_CACHES.name, str(next(_NUMBERS)))))


@pytest.fixture(scope="session")
def _traces() -> TracedOnce:
    from tests.traced_once import TracedOnce  # torch.export takes a while

    return TracedOnce()


@pytest.fixture
def traced_once(_traces: TracedOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal model is traced once: for tests of what is compiled, run and said, not of the trace."""
    for module in (
        "verify.programs.prepare_verification",
        "nnscaler.compile",
        "nnscaler.training.model_part.compile_submodule_as_program",
    ):
        monkeypatch.setattr(f"{module}.trace", _traces)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def examples(repository: Path) -> Path:
    """The folder of example models."""
    return repository / "examples"


@pytest.fixture
def golden(repository: Path, request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): the text is that of tests/text/<name>, or becomes it with --update-golden."""

    def compare(name: str, text: str) -> None:
        file = repository / "tests" / "text" / name
        if request.config.getoption("--update-golden"):
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), f"{name} changed; if that is meant, use --update-golden"

    return compare


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """A function after which the user presses Ctrl-C in half a second, also where SIGINT is ignored by the parent."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    try:
        yield timer.start
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
