"""The path that is traced is eager's: code that asks whether it is exported is told that it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.tracing import trace
from nnscaler.tracing.export import run_export

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def operators(graph: Graph) -> list[str]:
    return [op.operator for op in graph.operations]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)


class Asks(Model):
    """Each of these is eager's answer; a constant that is folded under export shows as another loss."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if torch.compiler.is_exporting() or torch.compiler.is_compiling():
            h = h * 2
        if is_compiling() or torch._utils.is_compiling():
            h = h * 3
        return h.sum()


def test_code_that_asks_whether_it_is_exported() -> None:
    traced = trace(Asks(), (X,))
    assert "aten.mul.Tensor" not in operators(traced.graph)
    assert traced.notes == ()


def test_without_the_shim_it_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_export, "_QUESTIONS", ())
    monkeypatch.setattr(run_export, "_FLAGS", ())
    with pytest.raises(NnscalerError, match="the traced graph is not the model"):
        trace(Asks(), (X,))


def test_torch_hears_the_truth() -> None:
    seen: list[bool] = []

    class Watches(Model):
        def forward(self, x: Tensor) -> Tensor:
            # a function of torch that asks: under export `torch.compile` is ignored
            seen.append(torch.compile(self.proj) is self.proj or not torch.compiler.is_exporting())
            return self.proj(x).sum()

    before = (torch.compiler.is_exporting, torch.compiler.is_compiling)
    trace(Watches(), (X,))
    assert all(seen)
    assert (torch.compiler.is_exporting, torch.compiler.is_compiling) == before
    assert not torch.compiler.is_exporting() and not torch.compiler._is_compiling_flag


class NeedsExport(Model):
    """Eager's path cannot be exported; what the model does under export is the same."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if not torch.compiler.is_compiling() and bool((x > 100).all()):
            h = h * 2
        return h.sum()


def test_the_path_of_export_where_eager_looks_at_data() -> None:
    with pytest.warns(UserWarning, match="when it is told that it is exported"):
        traced = trace(NeedsExport(), (X,))
    assert "test_as_eager.py" in traced.notes[0]
    with pytest.raises(NnscalerError, match="the traced graph is not the model"):
        trace(NeedsExport(), (X + 1000,))  # here eager multiplies


class TestKnownValues:
    """Values that no input reaches are known, also after writes through views."""

    def test_a_default_mask(self) -> None:
        class Masked(Model):
            def forward(self, x: Tensor) -> Tensor:
                mask = torch.ones(4, 6, dtype=torch.long, device=x.device)
                steps = torch.arange(6)
                if bool((torch.diff(steps, prepend=steps[:1] - 1) != 1).any()):
                    x = x * 2
                return self.proj(x).sum() if mask.all() else (self.proj(x) * mask).sum()

        assert "aten.mul.Tensor" not in operators(trace(Masked(), (X,)).graph)

    def test_writes_take_effect(self) -> None:
        class Written(Model):
            def forward(self, x: Tensor) -> Tensor:
                mask = torch.zeros(6)
                first = mask[:2]
                assert mask.sum().item() == 0
                first.fill_(1.0)
                mask[3] += 2.0
                return self.proj(x).sum() * int(mask.sum()) * len(mask.nonzero().tolist() if False else [1, 2])

        traced = trace(Written(), (X,))
        assert any(op.args[-1:] == (4,) for op in traced.graph.operations)

    @pytest.mark.parametrize("kind", ["input", "random", "parameter", "written"])
    def test_what_changes_from_step_to_step_is_unknown(self, kind: str) -> None:
        class Looks(Model):
            def forward(self, x: Tensor) -> Tensor:
                mask = torch.zeros(6)
                if kind == "written":
                    mask[:2] = x[0, :2]
                value = {"input": x, "random": torch.rand(6), "parameter": self.proj.bias, "written": mask}[kind]
                return self.proj(x).sum() * (2 if value.sum() > 1000 else 1)

        with pytest.raises(NnscalerError) as caught:
            trace(Looks(), (X,))
        assert caught.value.code == "trace_failed" and "--specialise" in (caught.value.help or "")
        assert caught.value.where is not None and "value.sum() > 1000" in caught.value.where.text


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda s: s[~torch.eye(len(s), dtype=torch.bool)].view(len(s), -1).logsumexp(1),
    "a mask of a dim": lambda s: s[:, torch.arange(s.shape[1]) > 1, None],
    "two dims": lambda s: s[1:][torch.ones(3, 4).tril(-1) == 1],
    "places": lambda s: s[torch.where(torch.ones(4, 4).triu(1))],
    "rows of places": lambda s: s[torch.ones(4, 4).triu().nonzero()[:, 1]],
    "places by dim": lambda s: s[torch.nonzero(torch.ones(4, 4).triu(), as_tuple=True)],
    "masked_select": lambda s: s.masked_select(torch.eye(4, dtype=torch.bool)),
    "a smaller mask": lambda s: torch.masked_select(s, torch.tensor([True, False, True, False])),
    "nothing": lambda s: torch.cat([s[torch.zeros(4, dtype=torch.bool)], s]),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_known_values_select_has_a_known_shape(name: str) -> None:
    class Selects(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.proj(x)
            return SELECTIONS[name](h @ h.t()).square().sum()

    assert trace(Selects(), (torch.randn(4, 6),)).notes == ()  # its own check compares it with eager


SIZES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # h of [4, 6], sizes of (3, 2)
    "split": lambda h, n: h.split([rows * columns for rows, columns in ((n[0], n[1] - 1), (1, 3))], 1)[1].exp(),
    "reshape": lambda h, n: h.reshape(-1, n[0], n[1]).softmax(1),
    "slice": lambda h, n: h[:, n[1] : n.sum()].softmax(1),
    "named": lambda h, n: h * torch.reshape(input=n.sum(), shape=(1,)) + torch.roll(input=h, shifts=n[1], dims=1),
    "new": lambda h, n: h[:, :3] * h.new_full((n[0],), 2.0) + torch.ones(4, n[0]),
}


@pytest.mark.parametrize("name", SIZES)
def test_known_numbers_are_sizes(name: str) -> None:
    """Levels of deformable attention have their sizes in a tensor, which torch reads where nothing sees it."""

    class Sized(Model):
        def forward(self, x: Tensor) -> Tensor:
            return SIZES[name](self.proj(x), torch.as_tensor([3, 2], device=x.device)).square().sum()

    assert trace(Sized(), (torch.randn(4, 6),)).notes == ()


def test_what_data_selects_is_refused() -> None:
    class Selects(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.proj(x)[x > 0].cumsum(0).square().sum()

    with pytest.raises(NnscalerError, match="a tensor's shape depends on data"):
        trace(Selects(), (torch.randn(4, 6),))


def test_transformers_is_not_imported_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    trace(Asks(), (X,))
    assert "transformers" not in sys.modules


def test_what_a_model_compiles_runs_as_it_is_written() -> None:
    """Compiled for the dtype that a tensor names, in the exact run of the self-check, it wrote past what it had."""
    asked: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        asked.append(graph)
        return graph.forward

    class Compiles(Model):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.compile(lambda h: torch.tanh(h) * 2, backend=backend)(self.proj(x))
            return result.sum()

    model = Compiles()
    assert "aten.tanh.default" in operators(trace(model, (X,)).graph)
    assert not asked
    model(X)
    assert asked  # on the user's side nothing has changed
