"""A DaGAN-like GAN: a head is animated, by key points, depth and a field of motion that warps its picture.

    nnscaler verify-plan examples/dagan.py::build_generator_step --ranks 2 --plan dp=2
    nnscaler verify-plan examples/dagan.py::build_discriminator_step --ranks 2 --plan tp=2
    python examples/train_dagan.py

Of two pictures of one head, the first is to be moved as the second is. Key points are the means of heat maps, and depth
is a map of its own (Hong et al. 2022). A mask for each key point says which places move with it; features of the first
picture are sampled where the motion comes from, attend to depth, and are darkened where nothing can be known. The
generator's step trains key points, depth and generator through the frozen discriminator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS = 3
SIZE = 16  # of a picture, in pixels
POINTS = 5
RECONSTRUCTION = 10.0  # its weight; that of features is 1


def grid(size: int, like: Tensor) -> Tensor:
    """[size, size, 2]: where each pixel is, x first, from -1 to 1."""
    places = (torch.arange(size, device=like.device).to(like) + 0.5) * (2 / size) - 1
    return torch.stack((places.expand(size, size), places[:, None].expand(size, size)), dim=-1)


def layer(inner: int, outer: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, stride=stride, padding=1), nn.GroupNorm(4, outer), nn.LeakyReLU(0.2)
    )


class KeyPoints(nn.Module):
    """Pictures and their depth to places [batch, POINTS, 2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            layer(COLOURS + 1, width), layer(width, width), nn.Conv2d(width, POINTS, 3, padding=1)
        )

    def forward(self, images: Tensor, depth: Tensor) -> Tensor:
        heat = self.maps(torch.cat((images, depth), dim=1)).flatten(2).softmax(-1)
        return heat @ grid(images.shape[-1], images).flatten(0, 1)


class Motion(nn.Module):
    """Where each place of the moved picture comes from [batch, SIZE, SIZE, 2], and what of it can be known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = layer(COLOURS + 1 + 2 * POINTS, width)
        self.masks = nn.Conv2d(width, POINTS + 1, 3, padding=1)
        self.known = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor, depth: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        places = grid(images.shape[-1], images)
        near, old = (torch.exp(-20 * (places - p[:, :, None, None]).square().sum(-1)) for p in (after, before))
        seen = self.layers(torch.cat((images, depth, near, near - old), dim=1))
        masks = self.masks(seen).softmax(1)  # the first one is of what stays
        shifts = torch.einsum("bphw,bpc->bhwc", masks[:, 1:], before - after)
        return places + shifts, torch.sigmoid(self.known(seen))


class Generator(nn.Module):
    """The first pictures, moved as the second ones are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.depth = nn.Sequential(layer(COLOURS, width), nn.Conv2d(width, 1, 3, padding=1), nn.Sigmoid())
        self.points = KeyPoints(width)
        self.motion = Motion(width)
        self.encode = layer(COLOURS, width)
        self.query = nn.Conv2d(1, width, 1)
        self.keys = nn.Conv2d(width, 2 * width, 1)
        self.decode = nn.Sequential(layer(2 * width, width), nn.Conv2d(width, COLOURS, 3, padding=1), nn.Tanh())

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        depth = self.depth(first)
        before, after = self.points(first, depth), self.points(second, self.depth(second))
        origin, known = self.motion(first, depth, before, after)
        features = F.grid_sample(self.encode(first), origin, align_corners=False)
        depth = F.grid_sample(depth, origin, align_corners=False)
        return self.decode(torch.cat((known * features, self.by_depth(depth, features)), dim=1))

    def by_depth(self, depth: Tensor, features: Tensor) -> Tensor:
        """Each place asks by its depth, and all places answer."""
        q = self.query(depth).flatten(2).transpose(1, 2)
        k, v = self.keys(features).flatten(2).transpose(1, 2).chunk(2, dim=-1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(2, features.shape[2:])


class Discriminator(nn.Module):
    """Pictures to features, and a score for each patch."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.features = nn.Sequential(layer(COLOURS, width, stride=2), layer(width, 2 * width, stride=2))
        self.score = nn.Conv2d(2 * width, 1, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        return features, self.score(features)


class DaGAN(nn.Module):
    """Holds both networks; the steps below share it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator()
        self.discriminator = Discriminator()


class DiscriminatorStep(nn.Module):
    """Real pictures are 1, and those that the generator moved are 0."""

    def __init__(self, gan: DaGAN) -> None:
        super().__init__()
        self.gan = gan

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        _, real = self.gan.discriminator(second)
        _, fake = self.gan.discriminator(self.gan.generator(first, second).detach())
        return (real - 1).square().mean() + fake.square().mean()


class GeneratorStep(nn.Module):
    """Moved pictures are as the second ones: in their pixels, in the discriminator's features, and to its eyes."""

    def __init__(self, gan: DaGAN) -> None:
        super().__init__()
        self.gan = gan

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        moved = self.gan.generator(first, second)
        features, score = self.gan.discriminator(moved)
        with torch.no_grad():
            wanted, _ = self.gan.discriminator(second)
        adversarial = (score - 1).square().mean() + F.l1_loss(features, wanted)
        return adversarial + RECONSTRUCTION * F.l1_loss(moved, second)


def build_gan() -> DaGAN:
    torch.manual_seed(0)
    return DaGAN()


def build_discriminator_step(gan: DaGAN | None = None) -> DiscriminatorStep:
    """The generator's parameters are there, and nothing trains them."""
    step = DiscriminatorStep(gan or build_gan())
    step.gan.discriminator.requires_grad_(True)
    step.gan.generator.requires_grad_(False)
    return step


def build_generator_step(gan: DaGAN | None = None) -> GeneratorStep:
    """The discriminator is frozen: gradients pass through it and stop nowhere in it."""
    step = GeneratorStep(gan or build_gan())
    step.gan.discriminator.requires_grad_(False)
    step.gan.generator.requires_grad_(True)
    return step


build_model = build_generator_step


def sample_inputs(batch: int = 6) -> dict[str, Tensor]:
    """One global batch of pairs of pictures."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(2, batch, COLOURS, SIZE, SIZE, generator=generator) * 2 - 1
    return {"first": first, "second": second}
