"""Data and models as users bring them: nested batches, rows of unlike lengths, numbers in a batch, what a run tells."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset

from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.training import build_from_settings
from nnscaler.training.build_from_settings import read_batches
from nnscaler.training.train_settings import TrainSettings
from nnscaler.training.trainer import Trainer

Row = dict[str, Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4)

    def outputs(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(x)))
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.outputs(x), y)


def rows(count: int = 24) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, generator=generator), "y": i % 4} for i in range(count)]


def trained(module: nn.Module, datasets: Any, **settings: Any) -> list[float]:
    """The losses of a run, without shuffling."""
    losses: list[float] = []
    given = {"batch_size": 8, "shuffle": False, **settings.pop("data", {})}
    fields = {"optimizer": {"name": "SGD", "lr": 0.5}, "plan": "dp=1", "epochs": 2, **settings}
    hooks = {"on_step": lambda trainer: losses.append(trainer.loss), **fields.pop("hooks", {})}
    Trainer(module=module, datasets=datasets, data=given, write=lambda text: None, hooks=hooks, **fields).fit()
    return losses


def plain(module: nn.Module, batches: list[Any], call: Callable[[nn.Module, Any], Tensor]) -> list[float]:
    """The losses of a loop of torch's over two epochs."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5), []
    for batch in batches * 2:
        loss = call(module, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def stacked(data: list[Any], collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate) -> list[Any]:
    return [collate(data[i : i + 8]) for i in range(0, len(data), 8)]


class Nested(Model):
    def forward(self, xs: dict[str, Tensor], y: Tensor) -> Tensor:
        return super().forward(xs["left"] + xs["right"], y)


def as_pairs(row: Row) -> tuple[Any, ...]:
    return {"right": row["x"] * 2, "left": row["x"]}, row["y"]


def as_dicts(row: Row) -> Row:
    return {"y": row["y"], "xs": {"right": row["x"] * 2, "left": row["x"]}}


@pytest.mark.parametrize("form", [as_pairs, as_dicts])
def test_batches_may_be_nested(form: Callable[[Row], Any]) -> None:
    data = [form(row) for row in rows(21)]  # the last batch is short
    expected = plain(Nested(), stacked(data), lambda m, b: m(**b) if isinstance(b, dict) else m(*b))
    assert trained(Nested(), data) == pytest.approx(expected, rel=1e-5)


def test_a_compiled_module_is_a_module() -> None:
    """It has a length, which asks the model's."""
    expected = plain(Model(), stacked(rows()), lambda m, b: m(**b))
    assert trained(torch.compile(Model()), rows()) == pytest.approx(expected, rel=1e-5)


class Lengths(Model):
    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return super().forward((x * mask[..., None]).sum(1), y)


def of_lengths() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(1 + i % 3, 6, generator=generator), "y": i % 4} for i in range(24)]


def padded(found: list[Row]) -> Row:
    x = nn.utils.rnn.pad_sequence([row["x"] for row in found], batch_first=True)
    lengths = torch.tensor([len(row["x"]) for row in found])
    mask = (torch.arange(x.shape[1])[None] < lengths[:, None]).float()
    return {"x": x, "mask": mask, "y": torch.tensor([row["y"] for row in found])}


def test_a_function_makes_a_batch_of_rows() -> None:
    expected = plain(Lengths(), stacked(of_lengths(), padded), lambda m, b: m(**b))
    found = trained(Lengths(), (of_lengths(), of_lengths()), data={"collate": padded}, validation={"every": 3})
    assert found == pytest.approx(expected, rel=1e-5)


class Once(IterableDataset[Row]):
    """Its own iterator, as that of a pipe: iterated again it has what was not read."""

    def __init__(self) -> None:
        self._rows = iter(rows())

    def __iter__(self) -> Iterator[Row]:
        return self._rows


class Counting(IterableDataset[Row]):
    """Goes on where it was, which each of its iterators moves."""

    def __init__(self) -> None:
        self._read = 0

    def __iter__(self) -> Iterator[Row]:
        while self._read < 24:
            self._read += 1
            yield rows()[self._read - 1]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [Once, Counting])
def test_a_stream_that_does_not_start_again_loses_no_rows(kind: type[IterableDataset[Row]], workers: int) -> None:
    whole = trained(Model(), rows(), epochs=1)
    assert trained(Model(), kind(), epochs=1, data={"workers": workers}) == whole and len(whole) == 3


class Drawn(list[Row]):
    """Rows with noise of torch's own generator, which are kept as they were given."""

    def __getitem__(self, index: Any) -> Any:
        self.append({"x": torch.randn(6), "y": 0})
        return list.__getitem__(self, -1)

    def __len__(self) -> int:
        return 24


def test_the_batch_that_is_compiled_for_takes_no_random_numbers() -> None:
    given = Drawn()
    trained(Model(), given, epochs=1)
    found = torch.stack([row["x"] for row in given])
    assert torch.equal(found[:8], found[8:16]) and not torch.equal(found[:8], found[16:24])


class Scaled(Model):
    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, y) * scale


def scales(changing: bool) -> Callable[[list[Row]], Row]:
    """A number of Python in each batch: 2.0, or of its first label."""

    def collate(found: list[Row]) -> Row:
        batch: Row = torch.utils.data.default_collate(found)
        return {**batch, "scale": 2.0 + changing * float(batch["x"][0, 0] > 0)}

    return collate


def test_a_number_in_a_batch_is_a_constant() -> None:
    expected = plain(Scaled(), stacked(rows(), scales(False)), lambda m, b: m(**b))
    assert trained(Scaled(), rows(), data={"collate": scales(False)}) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(NnscalerError, match=r"the batch has scale = \d.0, and the program was compiled with"):
        trained(Scaled(), rows(), data={"collate": scales(True)})


class Masked(Model):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, scale: float = 1.0, **others: Any) -> Tensor:
        x = x if mask is None else x * mask[:, None]
        return super().forward(x, y) * scale


def with_later(first: Row, later: Row) -> Callable[[list[Row]], Row]:
    """A batch with `first` besides, and from the second one on with `later`; the first is read twice."""
    given = iter([first, first, *[later] * 9])
    return lambda found: {**torch.utils.data.default_collate(found), **next(given)}


MASK = {"mask": torch.ones(8)}
LATER: dict[str, tuple[Row, Row, str]] = {
    "tensor": ({}, MASK, "the batch has mask = a tensor, and the program was compiled with None"),
    "dtype": (MASK, {"mask": torch.ones(8, dtype=torch.bool)}, "input 'mask' is bool, and the model was compiled for"),
    "wider": (
        MASK,
        {"mask": torch.ones(8).double()},
        "input 'mask' is float64, and the model was compiled for float32",
    ),
    "number": ({}, {"scale": 2.0}, "the batch has scale = 2.0, and the program was compiled with 1.0"),
    "default": ({"scale": 2.0}, {}, "the batch has scale = 1.0, and the program was compiled with 2.0"),
    "any": ({}, {"else": torch.ones(8)}, "the batch has else = a tensor, and the program was compiled with nothing"),
}


@pytest.mark.parametrize("case", LATER)
def test_an_argument_that_later_batches_alone_have_or_lack_is_refused(case: str) -> None:
    first, later, message = LATER[case]
    with pytest.raises(NnscalerError, match=message) as error:
        trained(Masked(), rows(), data={"collate": with_later(first, later)})
    assert ("in all of them" in str(error.value.help)) == (case in ("tensor", "any"))


class Widened(Model):
    """Casts what it is given, for which a program that was compiled for the wider dtype has no line."""

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, y) + (1e3 * mask.float()).square().mean()


def test_later_batches_in_a_narrower_dtype_are_cast() -> None:
    expected = trained(Widened(), rows(), data={"collate": with_later(MASK, MASK)})
    narrow = {"mask": torch.ones(8, dtype=torch.float16)}
    assert trained(Widened(), rows(), data={"collate": with_later(MASK, narrow)}) == expected


def test_a_default_may_be_left_out() -> None:
    expected = trained(Masked(), rows())
    assert trained(Masked(), rows(), data={"collate": with_later({"scale": 1.0, "mask": None}, {})}) == expected


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 9)

    def forward(self, ids: Tensor, labels: Tensor, **others: Any) -> Tensor:
        assert not others
        return nn.functional.cross_entropy(self.table(ids).flatten(0, 1), labels.flatten())


def test_of_packed_rows_a_model_gets_what_it_names() -> None:
    assert len(trained(Words(), [torch.arange(9)] * 16, data={"packed": 6})) == 6


def without(row: Row, name: str) -> Row:
    return {key: value for key, value in row.items() if key != name}


UNLIKE: dict[str, tuple[list[Any], str]] = {
    "lengths": (of_lengths(), r"\['x'\] of row 1 is of shape \[2, 6\], and that of row 0 is of shape \[1, 6\]"),
    "nothing": ([{**row, "z": None} for row in rows()], r"\['z'\] of row 0 is NoneType"),
    "keys": ([rows()[0], without(rows()[1], "y")], r"row 1 has \['x'\], and row 0 \['x'\], \['y'\]"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_rows_that_cannot_be_stacked(case: str) -> None:
    data, message = UNLIKE[case]
    with pytest.raises(NnscalerError, match=f"the rows of a batch cannot be stacked: {message}") as caught:
        trained(Model(), data)
    assert caught.value.code == "bad_data" and "`collate` of [data]" in str(caught.value.help)


def test_a_dataset_without_samples_is_told_where_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("KEPT = []\n\n\ndef datasets():\n    return KEPT\n")
    with pytest.raises(NnscalerError, match="the dataset, a list, has no samples") as caught:
        Trainer(module=Model(), plan="dp=1", steps=1, data={"source": f"{tmp_path}/rows.py::datasets"}).fit()
    where = caught.value.where
    assert where is not None and (Path(where.file).name, where.line, where.text) == ("rows.py", 4, "def datasets():")


def test_an_error_under_way_has_the_models_line() -> None:
    data = rows()
    data[13]["y"] = 7
    with pytest.raises(
        ProgramError,
        match=r"\(test_own_data\.py:\d+  `return nn\.functional\.cross_entropy.*: a label is not in range\(4\)",
    ):
        trained(Model(), data)


class Careful(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        if "NO_MORE" in os.environ:
            raise ValueError("no more")
        return gradient.clone()


class CarefulModel(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(Careful.apply(self.outputs(x)), y)  # type: ignore[no-untyped-call]


def test_an_error_in_a_function_of_the_users_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"on_step": lambda trainer: monkeypatch.setenv("NO_MORE", "1")}
    with pytest.raises(ProgramError, match=r"raised in \S+test_own_data\.py:\d+  `raise ValueError.*: no more"):
        trained(CarefulModel(), rows(), hooks=ends)


def broken_in_a_worker() -> Iterator[Row]:
    try:
        {}["row 13"]
    except KeyError:
        try:
            raise ValueError("row 13 is broken\nand another line")
        except ValueError:
            ExceptionWrapper(where="in DataLoader worker process 0").reraise()
    yield {}


def test_an_error_of_a_worker_has_its_own_text_and_line() -> None:
    with pytest.raises(NnscalerError, match=r"^reading the data raises ValueError: row 13 is broken\n") as caught:
        list(read_batches(broken_in_a_worker(), TrainSettings()))  # type: ignore[arg-type]
    where = caught.value.where
    assert where is not None and (Path(where.file), where.text[:16]) == (Path(__file__), "raise ValueError")


def cut_short() -> Iterator[Row]:
    yield rows()[0]
    raise OSError("image file is truncated")


def missing() -> Iterator[Row]:
    yield torch.load("no/such/row.pt")


def without_room() -> Iterator[Row]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    yield {}


@pytest.mark.parametrize("reads", [cut_short, missing])
def test_a_file_that_a_dataset_cannot_read_is_told_with_its_line(reads: Callable[[], Iterator[Row]]) -> None:
    """It is the user's, as everything else that a dataset raises; a disk without room is the machine's."""
    with pytest.raises(NnscalerError, match=r"^reading the data raises (OSError: image|FileNotFoundError)") as caught:
        list(read_batches(reads(), TrainSettings()))  # type: ignore[arg-type]
    assert caught.value.code == "data_raised"
    assert caught.value.where is not None and Path(caught.value.where.file) == Path(__file__)
    with pytest.raises(OSError, match="No space left"):
        list(read_batches(without_room(), TrainSettings()))  # type: ignore[arg-type]


class Outputs(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.outputs(x), y, reduction="none")


def test_a_model_without_a_loss_is_told_before_the_first_step() -> None:
    with pytest.warns(UserWarning, match="its program only runs forward"), pytest.raises(NnscalerError) as caught:
        trained(Outputs(), rows())
    assert caught.value.code == "no_loss"


def test_a_schedule_may_follow_the_validation_loss() -> None:
    rates: list[float] = []
    plateau = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 10.0, "threshold_mode": "abs", "factor": 0.5}
    hooks = {"on_step": [lambda trainer: rates.append(trainer.optimizer.param_groups[0]["lr"])]}
    trained(Model(), (rows(), rows(8)), schedule=plateau, validation={"every": 2}, hooks=hooks)
    assert rates == [0.5, 0.5, 0.5, 0.5, 0.25, 0.25]  # the first validation is the best
    with pytest.raises(NnscalerError, match="goes on after each validation, and the run has none"):
        trained(Model(), rows(), schedule=plateau)


def test_a_group_without_parameters_is_told_before_the_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_from_settings, "parallelize", lambda *_, **__: pytest.fail("it is compiled"))
    with pytest.raises(NnscalerError, match=r"'down\.bais' matches no parameter"):
        trained(Model(), rows(), optimizer={"name": "SGD", "lr": 0.5, "groups": {"down.bais": {"lr": 0.1}}})
