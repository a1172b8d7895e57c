"""Functions that pack, unpack or order elements otherwise than their annotation says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from verify.self_test.operators.mutants.mutant import EITHER, FIT, SHARDS, Family, OperatorMutant
from verify.self_test.operators.right_operators import (
    attend,
    channel_shuffle,
    glu,
    grouped_linear,
    pack,
    packed_attention,
    pixel_shuffle,
)

_FAMILY = Family("layout")
_ANY = EITHER | FIT


def _heads_first(x: Tensor, h: int) -> Tensor:
    q, k, v = x.view(*x.shape[:2], h, 3, -1).permute(3, 0, 2, 1, 4)
    return attend(q, k, v).transpose(1, 2).flatten(2)


def _three_last(x: Tensor, h: int) -> Tensor:
    q, k, v = x.view(*x.shape[:2], h, -1, 3).permute(4, 0, 2, 1, 3)
    return attend(q, k, v).transpose(1, 2).flatten(2)


def _packed() -> dict[str, object]:
    return {"x": torch.randn(3, 4, 3 * 12 * 2), "h": 12}


def _split_heads(x: Tensor, h: int) -> Tensor:
    return x.view(x.shape[0], h, -1).transpose(0, 1)


def _split_heads_inner(x: Tensor, h: int) -> Tensor:
    return x.view(x.shape[0], -1, h).permute(2, 0, 1)


def _split_heads_flat(x: Tensor, h: int) -> Tensor:
    return x.reshape(h, x.shape[0], -1)


def _heads() -> dict[str, object]:
    return {"x": torch.randn(5, 24), "h": 12}


def _softmax_heads(x: Tensor, h: int) -> Tensor:
    return x.view(x.shape[0], h, -1).softmax(-1).flatten(1)


def _softmax_inner(x: Tensor, h: int) -> Tensor:
    return x.view(x.shape[0], -1, h).softmax(1).flatten(1)


def _shuffle_wrong(x: Tensor, r: int, s: int) -> Tensor:
    b, c, h, w = x.shape
    y = x.view(b, r, s, c // (r * s), h, w)
    return y.permute(0, 3, 4, 1, 5, 2).reshape(b, c // (r * s), h * r, w * s)


def _shuffle_outer(x: Tensor, r: int, s: int) -> Tensor:
    b, c, h, w = x.shape
    y = x.view(b, c // (r * s), r, s, h, w)
    return y.permute(0, 1, 2, 4, 3, 5).reshape(b, c // (r * s), h * r, w * s)


def _pixels() -> dict[str, object]:
    return {"x": torch.randn(2, 12 * 6, 12, 12), "r": 2, "s": 3}


def _grouped_inner(x: Tensor, w: Tensor) -> Tensor:
    g, k, _ = w.shape
    return torch.einsum("tkg,gkn->tgn", x.view(-1, k, g), w).flatten(1)


def _grouped_interleaved(x: Tensor, w: Tensor) -> Tensor:
    g, k, _ = w.shape
    return torch.einsum("tgk,gkn->tng", x.view(-1, g, k), w).flatten(1)


def _pairs(x: Tensor) -> Tensor:
    return x[:, ::2] * torch.sigmoid(x[:, 1::2])


def _rotated_halves(x: Tensor, cos: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b, b * cos + a], -1)


def _rotated_pairs(x: Tensor, cos: Tensor) -> Tensor:
    a, b = x[:, ::2], x[:, 1::2]
    return torch.stack([a * cos - b, b * cos + a], -1).flatten(1)


def _patches(x: Tensor, p: int) -> Tensor:
    c, h, _ = x.shape
    return x.view(c, h // p, p, -1, p).permute(1, 3, 0, 2, 4).reshape(-1, c * p * p)


def _patches_channels_last(x: Tensor, p: int) -> Tensor:
    c, h, _ = x.shape
    return x.view(c, h // p, p, -1, p).permute(1, 3, 2, 4, 0).reshape(-1, c * p * p)


def _patches_columns_first(x: Tensor, p: int) -> Tensor:
    c, h, _ = x.shape
    return x.view(c, h // p, p, -1, p).permute(3, 1, 0, 2, 4).reshape(-1, c * p * p)


def _image() -> dict[str, object]:
    return {"x": torch.randn(12, 24, 12), "p": 2}


def _attention_groups(q: Tensor, k: Tensor, tiled: bool) -> Tensor:
    times = q.shape[0] // k.shape[0]
    wide = k.repeat(times, 1, 1) if tiled else k.repeat_interleave(times, 0)
    return q @ wide.transpose(1, 2)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[1] // 2
    return x[:, :half] * 1.0, x[:, half:] * 1.0


def _strided_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, ::2] * 1.0, x[:, 1::2] * 1.0


def _wide() -> tuple[Tensor, ...]:
    return (torch.randn(5, 24),)


def _heads_mutants() -> Iterator[OperatorMutant]:
    make = _FAMILY.mutant
    qkv = "b s^ (3 h d^) -> b s^ (h d^)"
    yield make("qkv packed by head", qkv, _heads_first, packed_attention, SHARDS, _packed)
    yield make("qkv packed innermost", qkv, _three_last, packed_attention, SHARDS, _packed)
    by_head = "b s^ (h 3 d^) -> b s^ (h d^)"
    yield make("qkv not packed by head", by_head, packed_attention, _heads_first, SHARDS, _packed)
    yield make("heads innermost", "s (h d) -> h s d", _split_heads_inner, _split_heads, SHARDS, _heads)
    yield make("heads without transposing", "s (h d) -> h s d", _split_heads_flat, _split_heads, SHARDS, _heads)
    inner = "s (d^ h) -> s (d^ h)"
    yield make("softmax of inner heads", "s (h d^) -> s (h d^)", _softmax_inner, _softmax_heads, SHARDS, _heads)
    yield make("softmax of outer heads", inner, _softmax_heads, _softmax_inner, SHARDS, _heads)
    yield make(
        "heads merged without transposing", "b h s d -> b s (h d)",
        lambda x: x.reshape(x.shape[0], x.shape[2], -1), lambda x: x.transpose(1, 2).flatten(2),
    )  # fmt: skip
    yield make(
        "heads of keys tiled", "(h g) q d^, h k d^ -> (h g) q k",
        lambda q, k: _attention_groups(q, k, True), lambda q, k: _attention_groups(q, k, False),
    )  # fmt: skip
    yield make(
        "heads of keys repeated", "(g h) q d^, h k d^ -> (g h) q k",
        lambda q, k: _attention_groups(q, k, False), lambda q, k: _attention_groups(q, k, True),
    )  # fmt: skip
    grouped = "t (g k+), g k+ n -> t (g n)"
    yield make("groups innermost in the input", grouped, _grouped_inner, grouped_linear)
    yield make("groups innermost in the output", grouped, _grouped_interleaved, grouped_linear)


def _image_mutants() -> Iterator[OperatorMutant]:
    make = _FAMILY.mutant
    pixels = "b (c r^ s^) h w -> b c (h r^) (w s^)"
    yield make("pixel shuffle with channels innermost", pixels, _shuffle_wrong, pixel_shuffle, SHARDS, _pixels)
    yield make("pixel shuffle in blocks", pixels, _shuffle_outer, pixel_shuffle, SHARDS, _pixels)
    patches = "c (h p^) (w p^) -> (h w) (c p^ p^)"
    yield make("patches with channels last", patches, _patches_channels_last, _patches, SHARDS, _image)
    yield make("patches with columns first", patches, _patches_columns_first, _patches, SHARDS, _image)


def _others() -> Iterator[OperatorMutant]:
    make = _FAMILY.mutant
    yield make("pairs for halves", "a (2 b) -> a b", _pairs, glu)
    yield make("halves for pairs", "a (b 2) -> a b", glu, _pairs)
    yield make("rotary of pairs for halves", "s (2 d), s d -> s (2 d)", _rotated_pairs, _rotated_halves)
    yield make("rotary of halves for pairs", "s (d 2), s d -> s (d 2)", _rotated_halves, _rotated_pairs)
    cat = "a b, a b -> a (2 b)"
    interleaved = lambda x, y: torch.stack([x, y], -1).flatten(1)  # noqa: E731 - used twice
    yield make("interleaved for concatenated", cat, interleaved, pack)
    yield make("concatenated for interleaved", "a b, a b -> a (b 2)", pack, interleaved)
    repeat = "a b -> (a 3) b"
    yield make("tiled for repeated", repeat, lambda x: x.repeat(3, 1), lambda x: x.repeat_interleave(3, 0))
    tile = "a b -> (3 a) b"
    yield make("repeated for tiled", tile, lambda x: x.repeat_interleave(3, 0), lambda x: x.repeat(3, 1))
    yield make("not transposed", "a b -> b a", lambda x: x * 1.0, lambda x: x.T * 1.0, _ANY)
    yield make("transposed in memory only", "a b -> b a", lambda x: x.reshape(x.shape[1], -1), lambda x: x.T * 1.0)
    yield make("flattened by columns", "a b -> (a b)", lambda x: x.T.reshape(-1), lambda x: x.reshape(-1))
    yield make(
        "rows innermost of columns", "a b, c b -> (a c) b",
        lambda x, y: (x[None] * y[:, None]).flatten(0, 1), lambda x, y: (x[:, None] * y).flatten(0, 1),
    )  # fmt: skip
    yield make("channels shuffled", "a b -> a b", lambda x: channel_shuffle(x, 2), lambda x: x * 1.0, SHARDS, _wide)
    yield make("sections by stride", "a [b c] -> a b, a c", _strided_parts, _parts, SHARDS, _wide)
    yield make("sections merged crosswise", "a b, a c -> a [b c]", lambda x, y: pack(x, y).roll(1, 1), pack)
    yield make(
        "batch and sequence swapped", "b s d -> (b s) d",
        lambda x: x.transpose(0, 1).flatten(0, 1), lambda x: x.flatten(0, 1),
    )  # fmt: skip
    yield make(
        "outer product transposed", "m, n -> (m n)",
        lambda x, y: torch.outer(y, x).flatten(), lambda x, y: torch.outer(x, y).flatten(),
    )  # fmt: skip
    frozen = "a b^, c^ -> a b^"
    yield make("frozen sizes that must agree", frozen, lambda x, w: x + w, lambda x, w: x + w.sum(), FIT)
    yield make("two outputs exchanged", "a b, a b -> a b, a b", _exchanged, lambda x, y: (x + y, x - y))


def _exchanged(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    flipped = torch.stack([x + y, x - y]).flip(1)
    return flipped[0], flipped[1]


def mutants() -> tuple[OperatorMutant, ...]:
    """Return every function with another layout than its annotation's."""
    return (*_heads_mutants(), *_image_mutants(), *_others())
