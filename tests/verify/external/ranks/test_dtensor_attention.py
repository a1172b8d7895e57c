"""Attention on DTensors on a CPU: divided by heads, by rows, and with masks, it is the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from verify.external.ranks.attention_and_float64_of_torch import register_attention
from verify.external.ranks.run_ranks_here_or_in_child import run_ranks


@pytest.mark.parametrize("placement", [Shard(1), Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("masked", ["causal", "all heads", "each head"])
def test_attention_on_dtensors(placement: Placement, masked: str) -> None:
    register_attention()
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(4)]
    mask = None if masked == "causal" else torch.randn(1, 1 if masked == "all heads" else 4, 6, 6, dtype=torch.float64)
    plain = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    expected = F.scaled_dot_product_attention(*plain, attn_mask=mask, is_causal=mask is None)
    expected.backward(whole[3])

    def on_rank(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        mine = [distribute_tensor(t, mesh, [placement]).requires_grad_() for t in whole[:3]]
        of_mask = placement if masked == "each head" and placement == Shard(1) else Replicate()
        other = None if mask is None else distribute_tensor(mask, mesh, [of_mask])
        found = F.scaled_dot_product_attention(*mine, attn_mask=other, is_causal=mask is None)
        assert isinstance(found, DTensor) and found.placements == (placement,)
        found.backward(distribute_tensor(whole[3], mesh, [placement]))
        return [found.full_tensor().detach(), *(t.grad.full_tensor() for t in mine)]  # type: ignore[union-attr]

    for result in run_ranks(on_rank, 2).results:
        for tensor, right in zip(result, [expected, *(t.grad for t in plain)], strict=True):
            torch.testing.assert_close(tensor, right, rtol=1e-12, atol=1e-12)


def test_a_whole_mask_of_divided_heads_makes_the_heads_whole() -> None:
    """Torch cannot lay out anew what is given by name: the result is right, and gathered."""
    register_attention()
    torch.manual_seed(0)
    q, mask = torch.randn(1, 4, 6, 8, dtype=torch.float64), torch.randn(1, 4, 6, 6, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    def on_rank(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        mine, other = distribute_tensor(q, mesh, [Shard(1)]), distribute_tensor(mask, mesh, [Replicate()])
        return F.scaled_dot_product_attention(mine, mine, mine, attn_mask=other).full_tensor()  # type: ignore[attr-defined, no-any-return]

    for result in run_ranks(on_rank, 2).results:
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_attention_over_shards_of_the_sequence(rotate: str, dtype: torch.dtype) -> None:
    """As `context_parallel` divides it: a causal one, whose rows are dealt out so that ranks have as much to do."""
    register_attention()
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 8, 8, dtype=dtype) for _ in range(4)]
    plain = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    F.scaled_dot_product_attention(*plain, is_causal=True).backward(whole[3])

    def on_rank(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        set_rotate_method(rotate)
        mine = [tensor.clone() for tensor in whole]
        with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 4):
            q, k, v, gradient = (tensor.clone().requires_grad_() for tensor in mine)
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)
        found: list[Tensor] = context_parallel_unshard(mesh, [t.grad for t in (q, k, v)], [2] * 3)
        return found

    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for result in run_ranks(on_rank, 2).results:
        for tensor, right in zip(result, (t.grad for t in plain), strict=True):
            torch.testing.assert_close(tensor, right, rtol=bound, atol=bound)
