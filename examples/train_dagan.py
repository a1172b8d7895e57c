"""A DaGAN-like model learns to move heads: two programs over one model, trained in turn by the loop of train_gan.py.

    python examples/train_dagan.py
    torchrun --nproc-per-node 2 examples/train_dagan.py --plan dp=2,zero=1

A head is a disc with two eyes, drawn twice: in two places, and turned by two angles. At the end moved pictures are
nearer to those that were wanted than the pictures they were made of.
"""

from __future__ import annotations

import dagan
import torch
from torch import Tensor
from train_gan import options, train


class Heads(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pair `first + i`, drawn from its number alone: one head in two poses."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)
        skin, eyes, ground = 0.3 * torch.rand(3, dagan.COLOURS, 1, 1, generator=generator)
        skin = 2 * skin + 0.4
        radius = 0.45 + 0.1 * torch.rand((), generator=generator)
        pictures = []
        for place in 0.8 * torch.rand(2, 2, generator=generator) - 0.4:
            turn = torch.rand((), generator=generator) - 0.5
            side = 0.5 * radius * torch.stack((turn.cos(), turn.sin()))
            picture = ground + (skin - ground) * disc(place, radius)
            for eye in (place + side, place - side):
                picture = picture + (eyes - picture) * disc(eye, 0.3 * radius)
            pictures.append(2 * picture - 1)
        return {"first": pictures[0], "second": pictures[1]}


def disc(centre: Tensor, radius: Tensor) -> Tensor:
    """1 within, 0 without, and in between a soft edge."""
    distance = (dagan.grid(dagan.SIZE, centre) - centre).norm(dim=-1)
    return torch.sigmoid(2 * dagan.SIZE * (radius - distance))


def main() -> None:
    chosen = options(__doc__, steps=200, folder="runs/dagan")
    model = dagan.build_gan()
    engine = train(dagan, model, Heads(0, 20_000), chosen)
    kept = torch.utils.data.default_collate([Heads(20_000, 256)[i] for i in range(256)])
    dagan.build_generator_step(model).load_state_dict(engine.state_dict())
    with torch.no_grad():
        moved = model.generator(kept["first"], kept["second"])
    if engine.rank == 0:
        still, found = ((picture - kept["second"]).abs().mean() for picture in (kept["first"], moved))
        print(f"mean error {still:.4f} of pictures that stay, {found:.4f} of those that are moved")


if __name__ == "__main__":
    main()
