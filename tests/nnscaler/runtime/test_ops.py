"""The runtime's own operators against torch's, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nnscaler.runtime import ops
from nnscaler.runtime.ops.random import kept, uniform


def cross_entropy(blocks: list[Tensor], labels: Tensor, ignore_index: int) -> Tensor:
    """The loss of logits whose classes are split in blocks."""
    widths = [b.shape[1] for b in blocks]
    starts = [sum(widths[:i]) for i in range(len(blocks))]
    m = torch.stack([ops.ce_max(b) for b in blocks]).amax(0)
    s = torch.stack([ops.ce_sumexp(b, m) for b in blocks]).sum(0)
    classes = sum(widths)
    pieces = [ops.ce_pick(b, labels, ignore_index, first, classes) for b, first in zip(blocks, starts, strict=True)]
    t = torch.stack(pieces).sum(0)
    return ops.ce_tail(s, m, t, labels, ignore_index) / ops.ce_count(labels, ignore_index)


@pytest.mark.parametrize("widths", [(9,), (3, 3, 3)])
@pytest.mark.parametrize("ignore_index", [-100, 0, 4])
def test_cross_entropy(widths: tuple[int, ...], ignore_index: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(7, 9, dtype=torch.float64) * 50).requires_grad_()
    labels = torch.tensor([0, 4, 8, ignore_index, 3, 2, ignore_index])
    loss = cross_entropy(list(logits.split(list(widths), 1)), labels, ignore_index)
    expected = F.cross_entropy(logits, labels, ignore_index=ignore_index)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    (found,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_logit_of_a_label_is_the_same_where_it_is_compiled(dtype: torch.dtype) -> None:
    """And is so in torch's own operators alone: what holds a Function of ours is compiled anew in every process."""
    logits = (torch.randn(7, 9) * 50).to(dtype)
    logits[1, 2], logits[2, 0] = -torch.inf, torch.inf
    labels = torch.tensor([0, 4, 8, -100, 3, 2, 7])
    called: list[str] = []

    def without_kernels(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(ops.ce_pick, backend=without_kernels, dynamic=False)
    for first, width in ((0, 9), (3, 3)):
        results = []
        for function in (ops.ce_pick, compiled):
            block = logits[:, first : first + width].clone().requires_grad_()
            picked = function(block, labels, -100, first, 9)
            results.append((picked.detach(), *torch.autograd.grad(picked, block, torch.arange(1.0, 8).to(picked))))
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager, rtol=0, atol=0)
    assert "where" in " ".join(called)
    assert not any("autograd_function" in name for name in called)


@pytest.mark.parametrize("label", [-1, 9])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    """As torch does, also where each block of classes takes it for another one's."""
    logits, labels = torch.randn(2, 9), torch.tensor([label, 1])
    for widths in ([9], [3, 3, 3]):
        with pytest.raises(RuntimeError, match=r"a label is not in range\(9\)"):
            cross_entropy(list(logits.split(widths, 1)), labels, -100)
    with pytest.raises(RuntimeError, match=r"a label is not in range\(9\)"):
        ops.ce_pick(logits, labels, -100)


@pytest.mark.parametrize("number", [-1, 8])
def test_an_id_without_an_embedding_is_refused(number: int) -> None:
    with pytest.raises(RuntimeError, match=r"id of an embedding is not in range\(8\)"):
        ops.embedding_block(torch.randn(4, 3), torch.tensor([0, number]), -1, 4, 8)


BLOCK, OTHER = torch.randn(4, 3), torch.randn(1, 3)
BY_INDEX: dict[str, Callable[[Tensor], Tensor]] = {  # of the last four of eight entries
    "index": lambda i: ops.index_block(BLOCK, [i], 4, 8),
    "index_put": lambda i: ops.index_put_block(BLOCK, [i], OTHER, False, 4, 8),
    "index_fill": lambda i: ops.write_block("index_fill.int_Scalar", BLOCK, 0, i, 4, 8, 1.0),
    "index_select": lambda i: ops.index_select_block(BLOCK, 0, i, 4, 8),
    "index_add": lambda i: ops.write_block("index_add.default", BLOCK, 0, i, 4, 8, OTHER),
    "gather": lambda i: ops.gather_block(BLOCK, 0, i.expand(1, 3), 4, 8),
    "scatter": lambda i: ops.write_block("scatter.src", BLOCK, 0, i.expand(1, 3), 4, 8, OTHER),
    "embedding_bag": lambda i: ops.embedding_bag(BLOCK, i[None], None, None, 0, False, None, 8, 4),
}


@pytest.mark.parametrize("name", BY_INDEX)
@pytest.mark.parametrize("number", [-9, -1, 0, 7, 8])
def test_an_index_is_refused_where_torchs_operator_refuses_it(name: str, number: int) -> None:
    wraps = number == -1 and name in ("index", "index_put", "index_fill")
    if 0 <= number < 8 or wraps:
        changed = BY_INDEX[name](torch.tensor([number]))
        last, kept = changed[-1], name in ("index_put", "index_fill", "index_add", "scatter")
        before = BLOCK[3] if kept else torch.zeros(3)
        assert torch.equal(last, before) is (number == 0)
    else:
        with pytest.raises(RuntimeError, match=r"index is not in range\(8\)"):
            BY_INDEX[name](torch.tensor([number]))


def test_cross_entropy_of_half_precision_is_computed_in_float32() -> None:
    logits = torch.randn(5, 40).bfloat16()
    labels = torch.arange(5)
    loss = cross_entropy([logits], labels, -100)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels), rtol=1e-6, atol=0)


@pytest.mark.parametrize("padding", [-1, 1, 5])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_embedding_block(padding: int, blocks: int) -> None:
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 5, 1], [7, 5, 4]])
    rows = 8 // blocks
    pieces = [ops.embedding_block(w, ids, padding, i * rows, 8) for i, w in enumerate(weight.split(rows))]
    out = torch.stack(pieces).sum(0)
    expected = F.embedding(ids, weight, padding_idx=None if padding < 0 else padding)
    assert torch.equal(out, expected)
    cotangent = torch.randn_like(out)
    (found,), (wanted,) = (torch.autograd.grad(y, weight, cotangent) for y in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dim, keepdim", [(None, False), ([], True), ([1], False), ([0, -1], True)])
def test_mean_over(dim: list[int] | None, keepdim: bool) -> None:
    x = torch.randn(4, 6, 2, dtype=torch.float64)
    expected = x.mean(dim or (0, 1, 2), keepdim)
    count = x.numel() // expected.numel()
    halves = [ops.mean_over(h, dim, keepdim, count) for h in x.split(1, dim=0 if dim != [1] else 1)]
    total = torch.stack(halves).sum(0) if dim != [1] else sum(halves)
    torch.testing.assert_close(total, expected)
    assert ops.mean_over(x.float(), dim, keepdim, count, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"])
def test_mean_of(loss: str) -> None:
    x, y = torch.randn(6, 2), torch.randn(6, 2)
    expected = getattr(torch.ops.aten, loss).default(x, y)
    torch.testing.assert_close(ops.mean_of(loss, 12, x, y, 2), expected)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_parts_of_batch_norm_are_batch_norm(shape: tuple[int, ...], affine: bool) -> None:
    """Over shards of the batch, with the sums taken between the parts; nothing is changed in place."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) if affine else None for _ in range(2))
    old_mean, old_variance = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    count, shards = x.numel() // 4, x.split((1, 2, 3))
    mean = torch.stack([ops.batch_mean(s, count) for s in shards]).sum(0)
    variance = torch.stack([ops.batch_variance(s, mean, count) for s in shards]).sum(0)
    y = torch.cat([ops.batch_normalise(s, mean, variance, w, b, 1e-5) for s in shards])
    new_mean = ops.running_statistic(old_mean, mean, 0.3)
    new_variance = ops.running_statistic(old_variance, variance[1], 0.3)
    assert not new_mean.requires_grad and not new_variance.requires_grad
    expected = F.batch_norm(x, old_mean, old_variance, w, b, True, 0.3, 1e-5)  # writes the old ones
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new_mean, old_mean, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(new_variance, old_variance, rtol=1e-12, atol=1e-13)
    cotangent, leaves = torch.randn_like(y), [t for t in (x, w, b) if t is not None]
    for found, wanted in zip(*(torch.autograd.grad(z, leaves, cotangent) for z in (y, expected)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def test_batch_norm_of_half_precision_takes_its_statistics_in_float32() -> None:
    x = (torch.randn(64, 3) + 30).bfloat16()
    mean = ops.batch_mean(x)
    variance = ops.batch_variance(x, mean)
    y = ops.batch_normalise(x, mean, variance, None, None, 1e-5)
    assert (mean.dtype, variance.dtype, y.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    torch.testing.assert_close(y.float(), F.batch_norm(x.float(), None, None, training=True), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("padding", [-1, 1, 5])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_embedding_bag(blocks: int, padding: int, scaled: bool) -> None:
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 5, 1], [7, 5, 5], [5, 1, 5]])
    scales = torch.randn(3, 3, dtype=torch.float64, requires_grad=True) if scaled else None
    whole, rows = blocks == 1, 8 // blocks
    ignored = None if padding < 0 else padding
    pieces = [
        ops.embedding_bag(w, ids, None, scales, 0, False, ignored, None if whole else 8, i * rows)
        for i, w in enumerate(weight.split(rows))
    ]
    found = torch.stack(pieces).sum(0)
    wanted = F.embedding_bag(ids, weight, mode="sum", per_sample_weights=scales, padding_idx=ignored)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)
    cotangent, leaves = torch.randn_like(found), [weight, *([] if scales is None else [scales])]
    for mine, torchs in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-13, atol=1e-14)


def test_dropout_without_a_stage_is_the_identity() -> None:
    x = torch.randn(3)
    assert torch.equal(ops.dropout(x, 0.5), x)


def test_the_hash_is_uniform_and_depends_on_every_part_of_its_key() -> None:
    where = [torch.arange(200), torch.arange(300)]

    def draw(seed: int = 0, name: str = "a", step: int = 0) -> Tensor:
        return uniform(seed, name, step, where, (200, 300))

    base = draw()
    assert base.min() >= 0 and base.max() < 1
    assert torch.histc(base, 10, 0, 1).sub(6000).abs().max() < 6 * (6000 * 0.9) ** 0.5
    others = [draw(seed=1), draw(name="b"), draw(step=1), base.roll(1, 0), base.roll(1, 1), base.flip(0)]
    for other in others:
        correlation = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]
        assert correlation.abs() < 6 / 60000**0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(200, 300), (300, 40, 5), (60000,)])
def test_what_is_kept_is_independent(p: float, shape: tuple[int, ...]) -> None:
    """Of neighbours, of other keys, and of the three other corners of a rectangle of elements."""
    where = [torch.arange(size) for size in shape]

    def draw(seed: int = 0, name: str = "a", step: int = 0) -> Tensor:
        found = kept(p, seed, name, step, where, shape)
        assert found.shape == shape
        return (found.double() - (1 - p)) / (p * (1 - p)) ** 0.5

    base, near = draw(), 6 / 60000**0.5
    assert base.mean().abs() < near
    others = [draw(seed=1), draw(name="b"), draw(step=1)]
    others += [base.roll(by, dim) for by in (1, 2, 3, 64) for dim in range(len(shape))]
    assert all((base * other).mean().abs() < near for other in others)
    if len(shape) > 1:
        corners = [base.roll(by, 0) * base.roll(by, -1) * base.roll((by, by), (0, -1)) for by in (1, 2, 3)]
        assert all((base * three).mean().abs() < near for three in corners)
        for dim in (0, -1):
            sums = base.sum(dim) / shape[dim] ** 0.5
            assert 0.7 < sums.var() < 1.4


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (3, 1, 1), (5, 64), (2, 3, 5, 7)])
def test_what_a_rank_keeps_is_a_piece_of_what_all_keep(shape: tuple[int, ...]) -> None:
    whole = kept(0.5, 0, "a", 0, [torch.arange(size) for size in shape], shape)
    assert whole.shape == shape and whole.dtype == torch.bool
    for dim, size in enumerate(shape):
        picked = torch.arange(size)[1::2]
        held = [picked if other == dim else torch.arange(whole.shape[other]) for other in range(len(shape))]
        assert torch.equal(kept(0.5, 0, "a", 0, held, shape), whole.index_select(dim, picked))
    assert kept(0.0, 0, "a", 0, [torch.arange(size) for size in shape], shape).all()


def test_the_hash_is_splitmix64() -> None:
    """The first output of splitmix64 from state 0 is 0xE220A8397B1DCDAF."""
    from nnscaler.runtime.ops.random import _mix, _mix_integer

    assert _mix_integer(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert int(_mix(torch.tensor(1))) % 2**64 == 0xE220A8397B1DCDAF
