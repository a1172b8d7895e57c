"""`torch.vmap` in a model: what is traced is the operators that it comes down to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.print_graph import print_graph
from nnscaler.tracing import trace
from tests.sampling import only
from verify.programs.typing import check_program

X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
PADDED = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) > 0.3


class Layer(nn.Module):
    """Attention with a mask of three dims, from a function of one entry that closes over a tensor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(6, 6)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        rows, places = torch.arange(x.shape[0]), torch.arange(x.shape[1])

        def allowed(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            entry = padded.index_select(0, row[None])[0].index_select(0, key[None])[0]
            return (key <= query) & (entry | (key == query))

        mask = torch.vmap(torch.vmap(torch.vmap(allowed, (None, None, 0)), (None, 0, None)), (0, None, None))
        scores = (self.w(x) @ x.transpose(1, 2)).masked_fill(~mask(rows, places, places), -1e9)
        return x + scores.softmax(-1) @ x


class Masked(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, padded)
        return x.square().mean()


def operators(graph: Graph) -> set[str]:
    return {op.operator.split(".")[1] for op in graph.operations}


@pytest.mark.long
@pytest.mark.parametrize("layers", only((1,), [1, 8]))
def test_masks_made_under_vmap(layers: int) -> None:
    """With eight layers, the repeated ones are not traced one by one, which gives the same graph."""
    batch = {"x": X, "padded": PADDED}
    traced = trace(Masked(layers), batch)
    assert traced.notes == ()
    assert {"le", "eq", "bitwise_or", "bitwise_and"} <= operators(traced.graph)
    assert all(op.where is not None and op.where.file == __file__ for op in traced.graph.operations)
    assert print_graph(traced.graph) == print_graph(trace(Masked(layers), batch, repeat_layers="off").graph)
    for plan in ("dp=2", "tp=2"):
        program = nnscaler.parallelize(Masked(layers), batch, ranks=2, plan=plan)
        assert check_program(program.sources, program.graph).proved


def test_gradients_go_through_vmap() -> None:
    """The trace compares them with those of the model."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.vmap(lambda row, scale: (row @ self.w).tanh() * scale, in_dims=(0, None), out_dims=1)
            return rows(x, self.w.sum()).square().mean()

    graph = trace(Rows(), {"x": X}).graph
    assert "tanh" in operators(graph)
    assert graph.tensors[graph.loss].needs_grad


def test_results_and_arguments_in_structures() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            def both(given: dict[str, Any], *, times: float) -> tuple[Tensor, dict[str, Tensor]]:
                return given["a"] * times, {"sum": given["a"] + given["b"]}

            a, rest = torch.vmap(both, in_dims=({"a": 0, "b": None},), chunk_size=2)({"a": x, "b": self.w}, times=3.0)
            return (a * rest["sum"]).sum()

    assert "add" in operators(trace(Several(), {"x": X}).graph)


class Doubled(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2.0


def test_a_backward_that_vmap_would_lose_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(Doubled.apply)(x * self.w).sum()

    with pytest.raises(NnscalerError) as caught:
        trace(Own(), {"x": X})
    assert "autograd.Function Doubled is called under vmap, where its backward would be lost" in str(caught.value)
    assert "without torch.vmap" in str(caught.value)


def test_masks_of_transformers() -> None:
    """Where a model adds a mask function of its own, `transformers` calls it under vmap and a mode."""
    masks = pytest.importorskip("transformers.masking_utils")

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(6, 6)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return padded[row, key] | (query == key)

            rows, length, _ = x.shape
            function = masks.and_masks(masks.causal_mask_function, seen)
            mask = masks.sdpa_mask(rows, length, length, mask_function=function, use_vmap=True)
            return nn.functional.scaled_dot_product_attention(self.w(x)[:, None], x[:, None], x[:, None], mask).mean()

    batch = {"x": X, "padded": PADDED}
    assert trace(Attending(), batch).notes == ()
    program = nnscaler.parallelize(Attending(), batch, ranks=2, plan="dp=2")
    assert check_program(program.sources, program.graph).proved


def test_a_model_of_transformers_that_adds_to_its_mask() -> None:
    """Unlimited-OCR on text: a sliding window that never slides past what came first."""
    ocr = pytest.importorskip("transformers.models.unlimited_ocr")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4}
    experts = {"num_experts_per_tok": 2, "n_shared_experts": 1, "sliding_window": 4, "max_position_embeddings": 64}
    config = ocr.UnlimitedOcrTextConfig(**sizes, **counts, **experts, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ocr.UnlimitedOcrTextModel(config)
            self.head = nn.Linear(32, 64)

        def forward(self, ids: Tensor) -> Tensor:
            hidden: Tensor = self.model(input_ids=ids, use_cache=False).last_hidden_state
            return self.head(hidden).square().mean()

    batch = {"ids": torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))}
    program = nnscaler.parallelize(Text(), batch, ranks=2, plan="tp=2")
    assert check_program(program.sources, program.graph).proved
