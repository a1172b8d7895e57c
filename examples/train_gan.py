"""A GAN is trained: two programs over one model, each with an optimizer of its own, on any number of ranks.

    python examples/train_gan.py
    torchrun --nproc-per-node 2 examples/train_gan.py --plan dp=2,zero=1

Images are discs of random colour and place, made as they are read. At the end fakes are much nearer to real images
than a new generator's, by the energy distance of their pixels: below 1 from 23, in ten seconds. The same command goes
on from the newest checkpoint in `--folder`.
"""

from __future__ import annotations

import argparse
import os
from types import ModuleType

import gan
import torch
from torch import Tensor, nn

import nnscaler

BATCH = 32
RANKS = int(os.environ.get("WORLD_SIZE", "1"))

Data = torch.utils.data.Dataset[dict[str, Tensor]]


class Discs(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Image `i`, a disc on a dark ground, and the latent vector of the fake beside it."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row, column, radius = (torch.rand(3, generator=generator) * torch.tensor([8, 8, 3]) + 4).tolist()
        colour = torch.rand(gan.COLOURS, 1, 1, generator=generator) * 0.8 + 0.2
        places = torch.arange(16.0)
        distance = ((places[:, None] - row) ** 2 + (places - column) ** 2).sqrt()
        disc = torch.sigmoid(2 * (radius - distance))
        return {"latent": torch.randn(gan.LATENT, generator=generator), "images": 2 * colour * disc - 1}


def energy_distance(first: Tensor, second: Tensor) -> float:
    """Return the energy distance of two sets of images (Szekely and Rizzo): 0 for one distribution."""
    a, b = first.flatten(1).double(), second.flatten(1).double()
    own = [torch.cdist(x, x).sum() / (len(x) * (len(x) - 1)) for x in (a, b)]
    return float(2 * torch.cdist(a, b).mean() - own[0] - own[1])


def options(about: str | None, steps: int, folder: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=f"dp={RANKS}")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--folder", default=folder)
    return parser.parse_args()


def train(steps: ModuleType, model: nn.Module, data: Data, chosen: argparse.Namespace) -> nnscaler.Engine:
    """Train both halves in turn, to the end or from the newest checkpoint on. `steps` builds the step of each half."""
    sample = torch.utils.data.default_collate([data[i] for i in range(BATCH)])
    # what is not trained by a step is frozen when it is compiled
    judging = nnscaler.parallelize(steps.build_discriminator_step(model), sample, ranks=RANKS, plan=chosen.plan)
    making = nnscaler.parallelize(steps.build_generator_step(model), sample, ranks=RANKS, plan=chosen.plan)
    judge = nnscaler.start(judging)
    maker = judge.another(making)  # over the same parameters and buffers
    optimizers = [engine.optimizer(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.99)) for engine in (judge, maker)]

    loader = judge.loader(data, batch_size=BATCH, shuffle=True)
    run = nnscaler.Checkpoints(chosen.folder, every=100)
    step = run.load(judge, optimizers, loader=loader)
    while step < chosen.steps:
        for batch in loader:
            losses = []
            for engine, optimizer in zip((judge, maker), optimizers, strict=True):
                losses.append(float(engine.step(batch)))
                optimizer.step()
                engine.zero_grad()
            step += 1
            if judge.rank == 0 and (step in (1, chosen.steps) or step % 50 == 0):
                print(f"step {step}  discriminator {losses[0]:.4f}  generator {losses[1]:.4f}")
            run.save(step, judge, optimizers, loader=loader)
            if step == chosen.steps:
                break
    run.finish()
    return judge


def main() -> None:
    chosen = options(__doc__, steps=300, folder="runs/gan")
    model, data = gan.build_gan(), Discs(20_000)
    engine = train(gan, model, data, chosen)
    real = torch.stack([data[i]["images"] for i in range(20_000 - 256, 20_000)])
    latent = torch.randn(256, gan.LATENT, generator=torch.Generator().manual_seed(0))
    before = model.generator(latent).detach()
    gan.build_generator_step(model).load_state_dict(engine.state_dict())
    after = model.generator(latent).detach()
    if engine.rank == 0:
        print(f"energy distance {energy_distance(before, real):.3f} before, {energy_distance(after, real):.3f} after")


if __name__ == "__main__":
    main()
