"""A convolutional GAN (DCGAN): two training steps over the same two networks, each a model of its own for the compiler.

    nnscaler verify-plan examples/gan.py::build_discriminator_step --ranks 4 --plan dp=2,tp=2
    nnscaler verify-plan examples/gan.py::build_generator_step --ranks 2 --plan tp=2

The step of the discriminator sees real images and fakes that carry no gradient; the step of the generator trains
through the frozen discriminator. Both normalise over the batch, so a step cannot be cut into micro-batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LATENT = 22
COLOURS = 3
SLOPE = 0.2
REAL = 0.9  # the one-sided smooth label
MATCHING = 0.1  # the weight of feature matching


class Generator(nn.Module):
    """[batch, LATENT] to images [batch, COLOURS, 16, 16]."""

    def __init__(self, width: int = 28) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(LATENT, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, COLOURS, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, latent: Tensor) -> Tensor:
        return self.layers(latent[:, :, None, None])


class Discriminator(nn.Module):
    """Images to features [batch, 2 * width, 4, 4] and one logit each."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(COLOURS, width, 4, stride=2, padding=1),
            nn.LeakyReLU(SLOPE, inplace=True),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(SLOPE, inplace=True),
        )
        self.logit = nn.Conv2d(2 * width, 1, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        return features, self.logit(features).flatten()


class GAN(nn.Module):
    """Holds both networks; the steps below share it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator()
        self.discriminator = Discriminator()
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(layer.weight, std=0.02)
            elif isinstance(layer, nn.BatchNorm2d):
                nn.init.normal_(layer.weight, 1.0, 0.02)


class DiscriminatorStep(nn.Module):
    """Real images are real, and the generator's are not."""

    def __init__(self, gan: GAN) -> None:
        super().__init__()
        self.gan = gan

    def forward(self, latent: Tensor, images: Tensor) -> Tensor:
        fakes = self.gan.generator(latent).detach()
        _, real = self.gan.discriminator(images)
        _, fake = self.gan.discriminator(fakes)
        on_real = F.binary_cross_entropy_with_logits(real, torch.full_like(real, REAL))
        return on_real + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))


class GeneratorStep(nn.Module):
    """Fakes pass for real, and their mean features are those of real images."""

    def __init__(self, gan: GAN) -> None:
        super().__init__()
        self.gan = gan

    def forward(self, latent: Tensor, images: Tensor) -> Tensor:
        features, logits = self.gan.discriminator(self.gan.generator(latent))
        with torch.no_grad():
            wanted, _ = self.gan.discriminator(images)
        adversarial = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        return adversarial + MATCHING * F.mse_loss(features.mean(0), wanted.mean(0))


def build_gan() -> GAN:
    torch.manual_seed(0)
    return GAN()


def build_discriminator_step(gan: GAN | None = None) -> DiscriminatorStep:
    """The generator's parameters are there, and nothing trains them."""
    step = DiscriminatorStep(gan or build_gan())
    step.gan.discriminator.requires_grad_(True)
    step.gan.generator.requires_grad_(False)
    return step


def build_generator_step(gan: GAN | None = None) -> GeneratorStep:
    """The discriminator is frozen: gradients pass through it and stop nowhere in it."""
    step = GeneratorStep(gan or build_gan())
    step.gan.discriminator.requires_grad_(False)
    step.gan.generator.requires_grad_(True)
    return step


build_model = build_generator_step


def sample_inputs(batch: int = 12) -> dict[str, Tensor]:
    """One global batch of latent vectors and real images."""
    generator = torch.Generator().manual_seed(0)
    return {
        "latent": torch.randn(batch, LATENT, generator=generator),
        "images": torch.rand(batch, COLOURS, 16, 16, generator=generator) * 2 - 1,
    }
