"""Autocast of another device than the one that a model is traced on: it stays in the program, or is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.runtime.training.autocast_on_any_device import autocast_on
from nnscaler.tracing import trace

Body = Callable[["Net", Tensor], Tensor]
OFF = (
    'torch.autocast("cuda", enabled=False) switches off torch.autocast("cpu") around it: any device is '
    "the one that runs the program; by itself torch keeps that region on"
)
KEPT = "is kept, as autocast of the device that runs the program; by itself torch leaves it out here, on the cpu"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch leaves regions of a device out that it lacks")


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.second, self.body = nn.Linear(6, 8), nn.Linear(8, 3), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).float().square().mean()


def plain(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        y = net.first(x)
    return net.second(y.float())


def default_dtype(net: Net, x: Tensor) -> Tensor:
    with torch.amp.autocast("cuda"):
        y = net.first(x)
    return net.second(y.float())


def old_form(net: Net, x: Tensor) -> Tensor:
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        y = net.first(x)
    return net.second(y.float())


def another_device(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("xpu", torch.bfloat16):
        y = net.first(x)
    return net.second(y.float())


def off_inside(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        y = net.first(x)
        with torch.autocast(x.device.type, enabled=False):
            return net.second(y.float())


def off_by_name_inside(net: Net, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = net.first(x)
        with torch.autocast("cuda", enabled=False):
            return net.second(y.float())


def off_by_its_own_name_inside(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        y = net.first(x)
        with torch.autocast("cuda", enabled=False):
            return net.second(y.float())


def asking(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        y = net.first(x)
        if torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled():
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
            y = y * 2
    assert not torch.is_autocast_enabled("cuda")
    return net.second(y.float())


class Tripled(torch.autograd.Function):
    """Computes in float32 wherever it is called."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


def own_function(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        y = Tripled.apply(net.first(x))
    return net.second(y.float())


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that it switches these off

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def decorated(net: Net, x: Tensor) -> Tensor:
        return net.second(F.silu(net.first(x)))

    @torch.cuda.amp.autocast(False)
    def decorated_off(net: Net, x: Tensor) -> Tensor:
        return net.second(F.silu(net.first(x)))

    @torch.autocast("cuda", dtype=torch.bfloat16, enabled=len("on") > 1)
    def decorated_somehow(net: Net, x: Tensor) -> Tensor:
        return net.second(F.silu(net.first(x)))

    MADE = torch.autocast("cuda", torch.bfloat16)


def made_before(net: Net, x: Tensor) -> Tensor:
    with MADE:
        return net.second(F.silu(net.first(x)))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
LOW, FULL = ("bfloat16", "bfloat16"), (None, "float32")


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    ("body", "linears", "named"),
    [
        (plain, [LOW, FULL], '"cuda", bfloat16'),
        (default_dtype, [("float16", "float16"), FULL], '"cuda", float16'),
        (old_form, [LOW, FULL], '"cuda", bfloat16'),
        (another_device, [LOW, FULL], '"xpu", bfloat16'),
        (off_inside, [LOW, FULL], '"cuda", bfloat16'),
        (off_by_name_inside, [LOW, FULL], ""),
        (off_by_its_own_name_inside, [LOW, FULL], '"cuda", bfloat16'),
        (asking, [LOW, FULL], '"cuda", bfloat16'),
        (own_function, [LOW, FULL], '"cuda", bfloat16'),
        (decorated, [LOW, LOW], '"cuda", bfloat16'),
        (decorated_off, [FULL, FULL], ""),
    ],
)
def test_regions_of_another_device_stay(body: Body, linears: list[tuple[str | None, str]], named: str) -> None:
    traced = trace(Net(body), (X,))  # which compares the graph with the model
    graph = traced.graph
    found = [op for op in graph.operations if op.operator == "aten.linear.default"]
    assert [(op.region.autocast, graph.tensors[op.outputs[0] or ""].dtype) for op in found] == linears
    notes = [note for note in traced.notes if "torch.autocast(" in note]
    told = [note.partition(": ")[2] for note in notes]
    other = [OFF] if body is off_by_name_inside else []
    assert told == ([f"torch.autocast({named}) {KEPT}"] if named else other)
    assert all(note.startswith(f"{__file__}:") for note in notes)
    if body is asking:
        assert [op.args[1] for op in graph.operations if op.operator.startswith("aten.mul.")] == [2]
    if body is own_function:
        assert [graph.tensors[op.outputs[0] or ""].dtype for op in graph.operations if "Tripled" in op.operator] == [
            "float32"
        ]
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("body", [decorated_somehow, made_before])
def test_regions_of_which_nothing_is_known_are_refused(body: Body) -> None:
    with pytest.raises(NnscalerError) as caught:
        trace(Net(body), (X,))
    assert caught.value.code == "trace_failed"
    made = 'a region of torch.autocast("cuda") is made outside of forward'
    assert caught.value.message == f"{made}, and torch has switched it off on this machine"
    assert caught.value.where is not None and caught.value.where.file == __file__
    assert "with torch.autocast(x.device.type, torch.bfloat16): ..." in (caught.value.help or "")


def test_a_model_without_data_has_no_dtypes_under_autocast() -> None:
    with pytest.raises(NnscalerError) as caught:
        trace(Net(plain).to("meta"), (X,))
    assert caught.value.message == "autocast to bfloat16 in a model without data (meta device)"
    assert "build the model on the CPU" in (caught.value.help or "")
    trace(Net(decorated_off).to("meta"), (X,))


def test_torch_is_left_as_it_was() -> None:
    names = ("__init__", "__enter__", "__exit__")
    before = [getattr(autocast_mode.autocast, name) for name in names]
    with autocast_on("cpu"), autocast_on("cpu"):
        assert [getattr(autocast_mode.autocast, name) for name in names] != before
        with pytest.raises(ZeroDivisionError), torch.autocast("cuda", torch.bfloat16):
            assert torch.mm(X, X.t()).dtype == torch.bfloat16
            raise ZeroDivisionError
        assert torch.mm(X, X.t()).dtype == torch.float32
    assert [getattr(autocast_mode.autocast, name) for name in names] == before
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")


def test_a_region_of_an_exact_run_is_off_without_a_word() -> None:
    with warnings.catch_warnings(), autocast_on("cpu"):
        warnings.simplefilter("error")
        for device in ("cpu", "cuda"):
            with torch.autocast(device, torch.float64):
                assert torch.mm(X, X.t()).dtype == torch.float32


def test_only_the_thread_that_asks() -> None:
    """Ranks of a simulator are threads; one ends while others go on, and a stranger sees nothing of it."""
    inside, leave = threading.Barrier(4), threading.Event()
    found: dict[int, list[torch.dtype]] = {}

    def rank(number: int) -> None:
        with autocast_on("cpu"):
            with torch.autocast("cuda", torch.bfloat16):
                inside.wait(60)
                dtypes = [torch.mm(X, X.t()).dtype]
            if number:
                leave.wait(60)
            with torch.autocast("cuda", torch.bfloat16):
                found[number] = [*dtypes, torch.mm(X, X.t()).dtype]

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.mm(X, X.t()).dtype == torch.float32
    threads[0].join(60)
    leave.set()
    for thread in threads:
        thread.join(60)
    assert found == {n: [torch.bfloat16] * 2 for n in range(3)}
