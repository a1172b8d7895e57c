"""The engine against the eager model: curves under several plans, sizes that were not compiled, accumulation."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import nnscaler
import verify
from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.training.cut_batch import DataPart
from nnscaler.tracing.float64_run import convert_floats
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from tests.sampling import every

FLOAT64 = EngineSettings(dtype="float64", device="cpu")


class Layer(nn.Module):
    def __init__(self, inputs: int, dropout: float, norm: bool) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, 10)
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.norm(self.up(x))))


class Model(nn.Module):
    """Two layers, dropout and batch norm: what differs between training and evaluation."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(6, 0.0, norm), Layer(10, dropout, norm)])
        self.head = nn.Linear(10, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


def model(**arguments: Any) -> Model:
    torch.manual_seed(0)
    return Model(**arguments)


def batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 6, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 3, (rows,), generator=generator),
    }


def compiled(module: nn.Module, plan: str, ranks: int, rows: int = 12) -> Program:
    sample = {"x": torch.randn(rows, 6), "y": torch.zeros(rows, dtype=torch.long)}
    return nnscaler.parallelize(module, sample, ranks=ranks, plan=plan)


def rows_of(whole: dict[str, Tensor], part: DataPart) -> dict[str, Tensor]:
    count = whole["x"].shape[0]
    first, last = (-(-count * i // part.count) for i in (part.index, part.index + 1))
    return {name: tensor[first:last] for name, tensor in whole.items()}


def on_ranks(program: Program, work: Callable[[Engine], Any], settings: EngineSettings = FLOAT64) -> list[Any]:
    ranks = program.manifest.ranks
    if ranks == 1:
        return [work(Engine(program, None, settings))]
    return Simulator(ranks).run(lambda communicator: work(Engine(program, communicator, settings)))


def eager(module: nn.Module, batches: Sequence[dict[str, Tensor]], **options: Any) -> list[float]:
    convert_floats(module, torch.float64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)
    losses = []
    for whole in batches:
        loss = module(**whole)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def curve(engine: Engine, batches: Sequence[dict[str, Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW([{"params": list(engine.parameters.values())}], lr=0.05, weight_decay=0.1)
    losses = []
    for whole in batches:
        losses.append(float(engine.step(rows_of(whole, engine.data_part))))
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


PLANS = [("dp=1", 1), ("dp=2", 2), ("dp=3", 3), ("tp=2", 2), ("pp=2", 2), ("dp=2,tp=2", 4), ("dp=2,zero=3", 2)]
ZERO = [("dp=2,zero=1", 2), ("dp=2,zero=2", 2), ("dp=3,zero=1", 3), ("dp=3,zero=2", 3), ("dp=2,tp=2,zero=1", 4)]


@pytest.mark.parametrize(("plan", "ranks"), every(2, PLANS + ZERO))
def test_the_curve_is_that_of_the_eager_model(plan: str, ranks: int) -> None:
    batches = [batch(12, seed) for seed in range(5)]
    expected = eager(model(), batches)
    for losses in on_ranks(compiled(model(), plan, ranks), lambda engine: curve(engine, batches)):
        assert losses == pytest.approx(expected, rel=1e-12)


class Fourier(Model):
    """A complex parameter: its gradients count in the norm, with both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6), y)


class Ids(Model):
    """Embeddings with `sparse=True`, for which a program has dense gradients."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.ids, self.bags = nn.Embedding(3, 6, sparse=sparse), nn.EmbeddingBag(3, 6, mode="sum", sparse=sparse)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + self.ids(y) + self.bags(y[:, None]), y)


class Mixes(Model):
    """Reads rows of other data parts, which a rank is then given too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + x.sort(0).values.flip(0), y)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "tp=2"])
@pytest.mark.parametrize("kind", [Fourier, Ids, Mixes])
def test_curves_of_models_that_are_not_as_others(kind: type[Model], plan: str) -> None:
    torch.manual_seed(0)
    module, batches = kind(), [batch(rows, rows) for rows in (12, 12, 5, 1)]
    plain = Ids(sparse=False) if isinstance(module, Ids) else kind()
    plain.load_state_dict(module.state_dict())
    expected = eager(plain, batches)
    for losses in on_ranks(compiled(module, plan, 2), lambda engine: curve(engine, batches)):
        assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "ranks"),
    every(
        2,
        [("dp=1", 1), ("dp=2", 2), ("dp=3", 3), ("dp=2,tp=2", 4), ("pp=2", 2), ("dp=2,zero=1", 2), ("dp=2,zero=3", 2)],
    ),
)
def test_batches_of_other_sizes_are_compiled_once(plan: str, ranks: int) -> None:
    batches = [batch(rows, rows) for rows in (12, 5, 12, 1, 5, 7, 1)]
    expected = eager(model(), batches)

    def work(engine: Engine) -> tuple[list[float], int]:
        return curve(engine, batches), len(engine.compilations)

    for losses, compilations in on_ranks(compiled(model(), plan, ranks), work):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert compilations == 3


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("dp=2", 2), ("tp=2", 2), ("pp=2", 2)])
def test_evaluation_is_that_of_the_model_in_evaluation_mode(plan: str, ranks: int) -> None:
    module = model(dropout=0.4, norm=True)
    whole = batch(8, 3)
    train = batch(12, 1)

    def work(engine: Engine) -> tuple[float, float, float]:
        before = float(engine.evaluate(rows_of(whole, engine.data_part)))
        engine.step(rows_of(train, engine.data_part))
        return before, float(engine.evaluate(rows_of(whole, engine.data_part))), float(engine.context.passes)

    found = on_ranks(compiled(module, plan, ranks), work)
    reference = model(dropout=0.4, norm=True).double()
    reference.eval()
    before = float(reference(**whole))
    reference.train()
    reference(**train)  # changes the running statistics
    reference.eval()
    after = float(reference(**whole))
    assert before != after
    for got in found:
        assert got[:2] == pytest.approx((before, after), rel=1e-12)
        assert got[2] == 1


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.layer(x).square().mean() + self.layer(shift).square().mean()


class Quantised(Model):
    """Rows of a buffer that a step moves, read again after it, and by evaluation alone what training has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.rescale = nn.Linear(10, 10)
        self.register_buffer("codes", torch.randn(4, 10))
        self.register_buffer("prior", torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        nearest = nn.functional.one_hot((x[:, None] - self.codes).square().sum(-1).argmin(1), 4).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.codes.lerp_(nearest.T @ x / (1 + nearest.sum(0)[:, None]), 0.1)
        x = x + (nearest @ self.codes - x).detach()
        scores = self.head(x if self.training else self.rescale(x))
        return nn.functional.cross_entropy(scores if self.training else scores - self.prior, y)


@pytest.mark.parametrize(("plan", "ranks"), [("pp=2", 2), ("dp=2,pp=2,zero=1", 4), ("dp=2,zero=3", 2)])
def test_evaluation_reads_what_other_stages_have(plan: str, ranks: int) -> None:
    torch.manual_seed(0)
    module, batches = Quantised(), [batch(12, seed) for seed in range(3)]
    program, plain = compiled(module, plan, ranks), copy.deepcopy(module)
    expected = eager(plain, batches)
    with torch.no_grad():
        expected += [float(plain.eval()(**batch(rows, 9))) for rows in (12, 1)]

    def work(engine: Engine) -> list[float]:
        evaluated = [rows_of(batch(rows, 9), engine.data_part) for rows in (12, 1)]
        engine.evaluate(evaluated[0])  # compiled before the buffer moves
        return [*curve(engine, batches), *(float(engine.evaluate(rows)) for rows in evaluated)]

    for found in on_ranks(program, work):
        assert found == pytest.approx(expected, rel=1e-11)


def test_an_input_that_is_no_rows_of_the_batch_has_the_same_values_on_all_ranks() -> None:
    values = batch(12)["x"]
    program = nnscaler.parallelize(Shifted(), {"x": values, "shift": values[:1]}, ranks=2, plan="dp=2")

    def work(engine: Engine, other: bool) -> float:
        rows = {"x": values[:6] if engine.rank == 0 else values[6:], "shift": values[engine.rank * other, None]}
        return engine.step(rows).item()

    assert len(set(on_ranks(program, lambda engine: work(engine, False)))) == 1
    with pytest.raises(NnscalerError, match="'shift' has other values on rank 1 than on rank 0"):
        on_ranks(program, lambda engine: work(engine, True))


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_ranks_of_one_data_part_have_the_same_rows(plan: str) -> None:
    """Random numbers of a dataset that differ between them give gradients of no batch at all."""
    program = compiled(model(), plan, 2)
    rows = [batch(12, seed) for seed in (0, 0, 1)]

    def work(engine: Engine, step: int) -> None:
        engine.step(rows[step + engine.rank])

    on_ranks(program, lambda engine: work(engine, 0))
    with pytest.raises(NnscalerError, match=r"'x' has other values on rank 1 .*one data part between them") as caught:
        on_ranks(program, lambda engine: work(engine, 1))
    assert caught.value.code == "batch_differs"


class Stream(IterableDataset[dict[str, Tensor]]):
    """24 samples, from the rank's own place on or all of them."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        whole = batch(24)
        return iter([{name: tensor[i] for name, tensor in whole.items()} for i in range(self.start, 24)])


def test_a_stream_that_is_read_by_parts_is_refused() -> None:
    """Every part takes its rows of the whole stream: of one that a rank has a part of, samples would be left out."""
    program = compiled(model(), "dp=2", 2)
    on_ranks(program, lambda engine: [engine.step(rows) for rows in engine.loader(Stream(0), 12)])
    with pytest.raises(NnscalerError, match="reads other samples of the stream than rank") as caught:
        on_ranks(program, lambda engine: next(iter(engine.loader(Stream(engine.rank), 12))))
    assert caught.value.code == "batch_differs"


def test_a_module_that_is_changed_is_compiled_for_other_sizes_as_before() -> None:
    module = model(dropout=0.0, norm=True)
    plain, batches = copy.deepcopy(module), [batch(12), batch(5)]
    engine = Engine(compiled(module, "dp=1", 1), None, FLOAT64)
    expected = eager(plain, batches)
    assert curve(engine, batches[:1]) == pytest.approx(expected[:1], rel=1e-12)
    module.eval()
    with pytest.warns(UserWarning, match="the model has training=False, and had training=True: the program goes on"):
        found = float(engine.step(batch(5)))
    assert found == pytest.approx(expected[1], rel=1e-12)
    module.train().head.requires_grad_(False)
    engine.step(batch(5))  # told once


@pytest.mark.long
def test_an_engine_holds_the_model_once() -> None:
    """A model that nobody else holds is freed once it is compiled, and other sizes are compiled all the same."""
    made, whole, other = model(dropout=0.5).double(), batch(8), batch(5, seed=1)
    eager = float(made.eval()(**other))
    module, weight = weakref.ref(made.train()), weakref.ref(made.head.weight)
    engine = nnscaler.start(nnscaler.parallelize(made, whole, ranks=1, plan="dp=1"), device="cpu")
    del made
    gc.collect()
    assert module() is None and weight() is None
    assert {tensor.device.type for tensor in engine.program.state.values()} == {"meta"}
    assert abs(float(engine.evaluate(other)) - eager) < 1e-12
    engine.step(other)
    assert len(engine.compilations) == 2


@pytest.mark.long
def test_what_a_model_refers_to_is_not_copied() -> None:
    class Held:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("it is not the model's")

    class Listed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.also, self.held, self.run = [self.head], Held(), self.classes

        def classes(self, x: Tensor) -> Tensor:
            return self.also[0](x)  # type: ignore[no-any-return]

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.run(x), y)

    torch.manual_seed(0)
    made, other = Listed().double(), batch(5, seed=1)
    eager, weight = float(made(**other)), weakref.ref(made.head.weight)
    engine = nnscaler.start(nnscaler.parallelize(made, batch(8), ranks=1, plan="dp=1"), device="cpu")
    del made
    gc.collect()
    assert weight() is None
    assert abs(float(engine.step(other)) - eager) < 1e-12


def test_a_model_that_is_shared_stays_as_it_is() -> None:
    made = model().double()
    program = nnscaler.parallelize(made, batch(8), ranks=1, plan="dp=1")
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    engines = [nnscaler.start(program, device="cpu") for _ in range(2)]
    for _ in range(2):
        engines[0].step(batch(6))
        engines[0].optimizer(torch.optim.SGD, lr=0.1).step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in engines[1].state_dict().items())
    assert not torch.equal(engines[0].state_dict()["head.weight"], before["head.weight"])
    assert not any(tensor.is_meta for tensor in program.state.values())


def test_programs_for_other_sizes_are_vouched_for() -> None:
    """What is compiled on the way is typed before it runs; a text that is not the model's stops every rank."""
    program = compiled(model(), "dp=2,zero=1", 2)
    asked: list[str] = []

    def checked(made: Program) -> None:
        verify.vouch(made)
        asked.append(str(made.manifest.shapes["x"]))
        if made.manifest.shapes["x"][0] == 7:
            text = made.sources["role_0.py"]
            wrong = text.replace("comm.all_reduce(", "comm.invariant(", 1)
            assert wrong != text
            verify.vouch(replace(made, sources={"role_0.py": wrong}))

    def work(engine: Engine) -> str:
        engine.step(rows_of(batch(8), engine.data_part))
        with pytest.raises(NnscalerError, match="is not proved") as error:
            engine.step(rows_of(batch(7), engine.data_part))
        return error.value.code

    assert on_ranks(program, work, replace(FLOAT64, vouch=checked)) == ["program_refuted"] * 2
    assert asked == ["(8, 6)", "(7, 6)"]
