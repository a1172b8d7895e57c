"""A learning rate that warms up and decays: a schedule of one's own, in a file and in Python.

    nnscaler train examples/warmup.toml
    python examples/warmup.py
    torchrun --nproc-per-node 2 examples/warmup.py

A schedule is a function of the optimizer that returns one of PyTorch's. Both runs train the GPT of train_gpt.py, and
print the same losses.
"""

from __future__ import annotations

import math
import os

import torch
import train_gpt

import nnscaler

RATE = 1e-2
STEPS = 60


def warmup_cosine(
    optimizer: torch.optim.Optimizer, warmup: int, total_steps: int, last: float = 0.1
) -> torch.optim.lr_scheduler.LambdaLR:
    """Go up linearly in `warmup` steps to the optimizer's rate, and down by half a cosine to `last` of it."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, total_steps - warmup)
        return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main() -> None:
    """The run of warmup.toml, as a loop."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    text, _ = train_gpt.datasets()
    sample = torch.utils.data.default_collate([text[i] for i in range(32)])
    torch.manual_seed(0)
    engine = nnscaler.start(nnscaler.parallelize(train_gpt.build_model(), sample, ranks=ranks, plan=f"dp={ranks}"))
    optimizer = engine.optimizer(torch.optim.AdamW, lr=RATE)
    schedule = warmup_cosine(optimizer, warmup=15, total_steps=STEPS)
    loader = engine.loader(text, batch_size=32, shuffle=True, drop_last=True)
    for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
        (rate,) = schedule.get_last_lr()
        loss = engine.step(batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        engine.zero_grad()
        if engine.rank == 0:
            print(f"step {step}  rate {rate:.2e}  loss {float(loss)}")


if __name__ == "__main__":
    main()
