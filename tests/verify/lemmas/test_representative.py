"""Small calls that stand for large ones."""

from __future__ import annotations

from math import prod

import pytest
import torch

from op_registry.call import TensorArgument

from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from tests.verify.lemmas.planted import called, floats, integers, proved, stated, users
from verify.programs.lemmas.small_call import LARGEST, represent
from verify.programs.lemmas.stand_in_calls_and_tensors import Unrepresented
from verify.results.verdict import Verdict

LINEAR = "aten.linear.default"


def small(operator: str, *args: object, outputs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes of the representative of a call."""
    obligation = stated(operator, called(operator, outputs, *args))
    call = represent(obligation.signature, 0).signature.call
    assert all(prod(t.shape) <= LARGEST for t in call.tensors())
    return [t.shape for t in call.tensors()]


def test_sizes_of_a_real_model_are_never_allocated() -> None:
    shapes = small(LINEAR, floats(64, 8192, 16384), floats(53248, 16384), outputs=[(64, 8192, 53248)])
    (batch, tokens, width), (hidden, same) = shapes
    assert width == same and len({batch, tokens, width, hidden}) == 4
    assert max(batch, tokens, width, hidden) < 50


def test_calls_that_differ_in_sizes_have_one_representative() -> None:
    one = small(LINEAR, floats(64, 8192, 16384), floats(53248, 16384), outputs=[(64, 8192, 53248)])
    two = small(LINEAR, floats(2, 3, 5), floats(7, 5), outputs=[(2, 3, 7)])
    assert one == two


def test_a_dim_of_size_1_stays_one() -> None:
    shapes = small("aten.add.Tensor", floats(64, 1, 4096), floats(1, 8192, 4096), outputs=[(64, 8192, 4096)])
    assert shapes[0][1] == 1 and shapes[1][0] == 1 and 1 not in (shapes[0][0], shapes[1][1])


def test_a_dim_of_size_1_that_makes_the_result_constant_grows() -> None:
    """A model whose experts are one group: the only index is 0, and all that is scattered is the number."""
    scatter = "aten.scatter.value"
    obligation = stated(scatter, called(scatter, [(8, 1)], floats(8, 1), 1, integers(8, 1), 1), Split("a"))
    found = represent(obligation.signature, 0)
    assert found.other_numbers and found.signature.call.tensors()[0].shape[1] > 1
    assert proved(obligation).verdict.passes


def test_a_mask_selects_as_many_rows_as_are_put_there() -> None:
    """Layers of LoRA put the rows of queries and values among those of keys, which have none."""
    put, mask = "aten.index_put.default", TensorArgument(0, (96,), "bool")
    obligation = stated(put, called(put, [(96, 32)], floats(96, 32), (mask,), floats(64, 32)), Split("b"))
    assert proved(obligation).verdict.passes


def test_the_matrices_of_a_small_call_are_square_where_they_have_to_be() -> None:
    """At their own size these are too many numbers: 12 x 6 x 18 x 64 x 64."""
    solve = "aten.linalg_solve_triangular.default"
    matrices, right = floats(6, 4, 8, 64, 64), floats(6, 4, 8, 64, 32)
    obligation = stated(solve, called(solve, [right.shape], matrices, right, upper=False), Split("a"))
    rows, columns = represent(obligation.signature, 0).signature.call.tensors()[0].shape[-2:]
    assert rows == columns < 10
    assert proved(obligation).verdict.passes


@pytest.mark.parametrize("operator", ["aten.linalg_cholesky.default", "aten.logdet.default"])
def test_matrices_that_have_to_be_positive_definite_are(operator: str) -> None:
    """Random ones are not, and the determinant of one is negative as often as not."""
    result = (8,) if "logdet" in operator else (8, 16, 16)
    obligation = stated(operator, called(operator, [result], floats(8, 16, 16)), Split("a"))
    assert proved(obligation).verdict.passes


def test_declared_sizes_follow() -> None:
    obligation = stated(
        "aten.reshape.default",
        called("aten.reshape.default", [(8, 512, 32, 128)], floats(8, 512, 4096), [8, 512, 32, 128]),
    )
    call = represent(obligation.signature, 0).signature.call
    assert list(call.args[1]) == list(call.outputs[0].shape) and call.outputs[0].shape != (8, 512, 32, 128)


def test_numbers_that_are_no_sizes_stay() -> None:
    obligation = stated("aten.chunk.default", called("aten.chunk.default", [(8, 4096)] * 3, floats(8, 12288), 3, -1))
    call = represent(obligation.signature, 0).signature.call
    assert call.args[1:] == (3, -1) and call.tensors()[0].shape[1] % 3 == 0


def test_ids_are_within_the_table() -> None:
    shapes = small("aten.embedding.default", floats(128256, 4096), integers(8, 512), outputs=[(8, 512, 4096)])
    assert shapes[0][0] < 50


@pytest.mark.long
def test_a_user_s_operator_that_insists_on_a_size_keeps_it() -> None:
    def only_64(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 64
        return x.softmax(1)

    spec = users(only_64, "a b^ -> a b^")
    result = proved(stated(spec, called("planted", [(4096, 64)], floats(4096, 64)), Split("a")))
    lemma = next(m for m in result.lemmas if "splits" in m.text)
    assert "64" in lemma.called and lemma.strength is Verdict.PROVED_BOUNDED and "b == 64" in lemma.blocker


def test_what_cannot_be_made_small_says_why() -> None:
    def only_large(x: torch.Tensor) -> torch.Tensor:
        if x.numel() < 10**9:
            raise ValueError("it is too small")
        return x

    spec = users(only_large, "a b -> a b")
    obligation = stated(spec, called("planted", [(65536, 65536)], floats(65536, 65536)), Split("a"))
    with pytest.raises(Unrepresented, match="too small"):
        represent(obligation.signature, 0)
    result = proved(obligation)
    assert result.verdict is Verdict.INCONCLUSIVE and "too small" in str(result.weakest)


def test_an_infinity_among_the_arguments_is_made_finite() -> None:
    """Results with infinities cannot be compared, and what fills a mask says nothing of splits."""
    mask = TensorArgument(0, (6, 4), "bool")
    call = called("aten.masked_fill.Scalar", [(6, 4)], floats(6, 4), mask, float("-inf"))
    small = represent(stated("aten.masked_fill.Scalar", call).signature, 0)
    assert small.signature.call.args[2] == -3.0 and small.other_numbers


@pytest.mark.parametrize("given", [(), (0, 2), (6,)], ids=["by default", "a sum", "another blank"])
def test_lengths_leave_targets_a_path(given: tuple[int, ...]) -> None:
    """Drawn one by one, a sequence is shorter than its target, and the loss is infinite."""
    lengths = TensorArgument(2, (24,), "int64"), TensorArgument(3, (24,), "int64")
    args = floats(20, 24, 7), TensorArgument(1, (24, 9), "int64"), *lengths, *given
    small = represent(stated("aten.ctc_loss.Tensor", called("aten.ctc_loss.Tensor", [()], *args)).signature, 0)
    assert small.runner.prepare(small.inputs).whole.finite


def test_an_operator_without_annotation_is_looked_at_as_it_is_called() -> None:
    call = called("aten.cauchy.default", [(7, 3)], floats(7, 3))
    small = represent(Signature(call, None, None, ()), 0)
    assert small.signature.call.tensors()[0].shape == (7, 3)
    assert small.signature.bound is not None and not small.signature.bound.sizes
