"""What a training step of Llama costs on one device: the generated program beside the eager model, in bfloat16.

    python benchmarks/gpu.py                                  7 B parameters, 4,096 tokens, all layers recomputed
    python benchmarks/gpu.py --size tiny --device cpu         to see that it runs
    python benchmarks/gpu.py --only eager program             without torch.compile

MFU is model FLOP utilisation as PaLM counts it (Chowdhery et al. 2022): 6 N + 12 L h s per token, nothing of what is
recomputed, over the peak of the device in bfloat16. `program` is the program for one rank, as `nnscaler train` runs it:
gradients are summed in float32, those of the eager model lie in bfloat16. Both have the same weights, and their first
losses are compared. The optimizer is torch's fused AdamW with states in bfloat16 in all rows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parent.parent))

import nnscaler
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.training.programs_by_batch_size import folder_of

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16, SXM
CLOSE = 0.02  # losses of two ways to compute in bfloat16


@dataclass(frozen=True)
class Size:
    """A Llama, and the tokens of a sequence."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int


SIZES = {
    "7b": Size(4096, 11008, 32, 32, 32000, 4096),
    "1b": Size(2048, 5504, 24, 16, 32000, 4096),
    "tiny": Size(64, 176, 4, 4, 256, 128),
}
WAYS = ("eager", "program", "compiled-eager", "compiled-program")


@dataclass(frozen=True)
class Measured:
    """A way to run a step.

    first    loss of the first step
    seconds  median of a step
    memory   bytes that were allocated at most; 0 on a CPU
    """

    first: float
    seconds: float
    memory: int


def model_on(device: torch.device, size: Size) -> LlamaForCausalLM:
    """Return the model; with the same weights each time on a device that has data."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def batch_on(device: torch.device, size: Size, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, size.vocabulary, (samples, size.tokens), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def eager(device: torch.device, size: Size, samples: int, compiled: bool) -> Iterator[Callable[[], Tensor]]:
    """Yield a step of the model as an expert writes it."""
    model = model_on(device, size)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    batch = batch_on(device, size, samples)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield step


def program(device: torch.device, size: Size, samples: int, compiled: bool) -> Iterator[Callable[[], Tensor]]:
    """Yield a step of the program that the compiler makes for one rank."""
    meta = torch.device("meta")
    sample = {name: t.to(meta) for name, t in batch_on(torch.device("cpu"), size, samples).items()}
    made = nnscaler.parallelize(model_on(meta, size), sample, ranks=1, plan="data:dp=1,recompute=1", self_check=False)
    model = model_on(device, size)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: held[name].detach() if name in held else tensor for name, tensor in made.state.items()}
    assert not any(t.is_meta for t in state.values()), [name for name, t in state.items() if t.is_meta]
    role = load_role(folder_of(made.sources, None) / made.manifest.role_of(0).file)
    settings = ExecutorSettings(device=device, shapes=made.manifest.shapes, compiled=compiled)
    executor = RankExecutor(role, 0, Simulator(1).communicators[0], state, settings)
    del model, held, state
    optimizer = torch.optim.AdamW(list(executor.parameters.values()), lr=1e-4, fused=True)
    batch = batch_on(device, size, samples)

    def step() -> Tensor:
        loss = executor.step(batch)
        optimizer.step()
        executor.zero_grad()
        assert loss is not None
        return loss.detach()

    yield step


def measured(way: str, device: torch.device, size: Size, samples: int, steps: int) -> Measured:
    """Run some steps one way."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    made = (eager if way.endswith("eager") else program)(device, size, samples, way.startswith("compiled"))
    step = next(made)
    first = float(step())
    step()
    times = []
    for _ in range(steps):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() if on_gpu else 0
    made.close()
    del step, made
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Measured(first, statistics.median(times), memory)


def flops_of(size: Size, samples: int) -> float:
    """Return the FLOPs of a step: forward once and backward, with all of attention."""
    each = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate
    parameters = size.layers * each + 2 * size.vocabulary * size.hidden
    matrices = parameters - size.vocabulary * size.hidden  # a table is looked up
    tokens = samples * size.tokens
    return tokens * (6.0 * matrices + 12.0 * size.layers * size.hidden * size.tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="7b")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=["eager", "program"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device, size = torch.device(options.device), SIZES[options.size]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    print(f"{name}, torch {torch.__version__}: {options.size}, {options.samples} x {size.tokens} tokens, recomputed")
    rows: dict[str, Measured] = {}
    for way in options.only:
        rows[way] = measured(way, device, size, options.samples, options.steps)
        row, base = rows[way], rows[options.only[0]]
        rate = flops_of(size, options.samples) / row.seconds
        mfu = "" if peak is None else f"   MFU {100 * rate / peak:5.1f} %"
        print(
            f"{way:18} {1e3 * row.seconds:9.1f} ms   ratio {row.seconds / base.seconds:5.3f}   "
            f"{row.memory / 2**30:6.1f} GiB{mfu}   first loss {row.first:.4f}",
            flush=True,
        )
    losses = [row.first for row in rows.values()]
    apart = max(losses) - min(losses)
    print(f"first losses are {apart:.4f} apart" + ("" if apart < CLOSE else ": NOT THE SAME MODEL"))
    return 0 if apart < CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
