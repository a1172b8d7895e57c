"""A small decoder, made parallel by hand three times, and fifteen mistakes in doing so.

    nnscaler verify-external find_the_bug.py::tensor_parallel --mesh tp=2    right
    nnscaler verify-external find_the_bug.py::bug_1 --mesh tp=2              wrong

Pages and a notebook are made from this file (write_bugs.py): a bug is the text between two `# bug` lines.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, HEADS, HEAD, HIDDEN, TOKENS, ROWS = 14, 16, 4, 4, 24, 6, 4
IGNORED = -100


# The model, as it is on one device


def rope(x, start=0):  # rotary positions
    places = torch.arange(x.shape[2], dtype=x.dtype) + start
    angles = places[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    start = 0  # place of the first token
    scale = HEAD**-0.5

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm = Norm(HEAD), Norm(HEAD)

    def all_keys(self, x):
        return x

    def seen(self, rows, columns):  # is the column's token no later than the row's?
        return torch.arange(columns) <= torch.arange(rows)[:, None] + self.start

    def forward(self, x):
        q, k, v = (y(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in (self.q, self.k, self.v))
        q, k = rope(self.q_norm(q), self.start), rope(self.k_norm(k), self.start)
        k, v = self.all_keys(k), self.all_keys(v)
        scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~self.seen(q.shape[2], k.shape[2]), -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attention = Norm(WIDTH), Attention()
        self.norm_2, self.up, self.down = Norm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, WORDS)

    def own(self, batch):  # the part of a batch that this rank is to do
        return batch

    def count(self, labels):  # by how many labels a loss is divided
        return (labels != IGNORED).sum()

    def forward(self, ids):
        return self.head(self.norm(self.block(self.words(ids))))


def model():
    return Decoder()


def batch():  # the last two rows are short
    ids = torch.randint(0, WORDS, (ROWS, TOKENS + 1))
    labels = ids[:, 1:].clone()
    labels[2:, 4:] = IGNORED
    return ids[:, :-1], labels


def step(model, batch):
    ids, labels = model.own(batch)
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss / model.count(labels)


# The pieces of which parallel programs are made


class Copied(torch.autograd.Function):  # into split layers: the same on all ranks; gradients are summed
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class Summed(torch.autograd.Function):  # out of split layers: summed; every rank has the whole gradient
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gathered(torch.autograd.Function):  # tokens of all ranks; of the gradients' sum, those of the own tokens
    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx, gradient):
        return own(summed(gradient), ctx.dim), None


def summed(x):
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


def gathered(x, dim):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def own(x, dim, rank=None):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank() if rank is None else rank].contiguous()


class Columns(nn.Module):  # a linear layer that has some of its outputs
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(own(p.detach(), 0)) for p in (layer.weight, layer.bias))

    def forward(self, x):
        return F.linear(Copied.apply(x), self.weight, self.bias)


class Rows(nn.Module):  # a linear layer that has some of its inputs
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(layer.weight.detach(), 1)), layer.bias

    def forward(self, x):
        return Summed.apply(F.linear(x, self.weight)) + self.bias


def on_gradients(parameters, change):  # of each gradient when it is whole
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: change(p.grad))


# The right programs


def tensor_parallel(model, mesh, columns=Columns, rows=Rows):
    block = model.block
    for layer in ("q", "k", "v"):
        setattr(block.attention, layer, columns(getattr(block.attention, layer)))
    block.attention.o = rows(block.attention.o)
    block.up, block.down = columns(block.up), rows(block.down)
    shared = [*block.attention.q_norm.parameters(), *block.attention.k_norm.parameters()]
    on_gradients(shared, dist.all_reduce)  # each rank has the gradient of its own heads
    return model


def average(gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def context_parallel(model, mesh):
    attention = model.block.attention
    attention.start = dist.get_rank() * (TOKENS // dist.get_world_size())
    attention.all_keys = lambda x: Gathered.apply(x, 2)
    model.own = lambda batch: tuple(own(x, 1) for x in batch)
    model.count = whole_count
    on_gradients(model.parameters(), average)
    return model


def whole_count(labels):  # the mean over ranks of losses divided by it is the loss
    return summed((labels != IGNORED).sum()) / dist.get_world_size()


def data_parallel(model, mesh):
    model.count = whole_count
    on_gradients(model.parameters(), average)
    return model


# bug 1: tensor parallel, tp=2


class LocalRows(Rows):
    def forward(self, x):
        return F.linear(x, self.weight) + self.bias


def bug_1(model, mesh):
    return tensor_parallel(model, mesh, rows=LocalRows)


# bug 2: tensor parallel, tp=2


class ReadColumns(Columns):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def bug_2(model, mesh):
    return tensor_parallel(model, mesh, columns=ReadColumns)


# bug 3: tensor parallel, tp=2


class EarlyRows(Rows):
    def forward(self, x):
        return Summed.apply(F.linear(x, self.weight, self.bias))


def bug_3(model, mesh):
    return tensor_parallel(model, mesh, rows=EarlyRows)


# bug 4: tensor parallel, tp=2


def bug_4(model, mesh):
    k = model.block.attention.k
    tensor_parallel(model, mesh)
    other = (dist.get_rank() + 1) % dist.get_world_size()
    model.block.attention.k.weight = nn.Parameter(own(k.weight.detach(), 0, other))
    return model


# bug 5: tensor parallel, tp=2


def bug_5(model, mesh):
    tensor_parallel(model, mesh)
    model.block.attention.scale = (model.block.attention.q.weight.shape[0] / HEADS) ** -0.5
    return model


# bug 6: tensor parallel, tp=2


def bug_6(model, mesh):
    block = model.block
    for layer in ("q", "k", "v"):
        setattr(block.attention, layer, Columns(getattr(block.attention, layer)))
    block.attention.o, block.up, block.down = Rows(block.attention.o), Columns(block.up), Rows(block.down)
    return model


# bug 7: tensor parallel, tp=2


class Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x[..., None], -1).flatten(-2)

    @staticmethod
    def backward(ctx, gradient):
        return own(gradient.unflatten(-1, (-1, dist.get_world_size())), -1)[..., 0]


class Head(Columns):
    def forward(self, x):
        return Joined.apply(super().forward(x))


def bug_7(model, mesh):
    model.head = Head(model.head)
    return model


# bug 8: tensor parallel, tp=2


class SplitWords(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.weight = nn.Parameter(own(words.weight.detach(), 0))

    def forward(self, ids):
        local = ids - dist.get_rank() * len(self.weight)
        return Summed.apply(F.embedding(local.clamp(0, len(self.weight) - 1), self.weight))


def bug_8(model, mesh):
    model.words = SplitWords(model.words)
    return model


# bug 9: context parallel, cp=2


def bug_9(model, mesh):
    context_parallel(model, mesh)
    start = model.block.attention.start
    model.block.attention.start = 0
    model.block.attention.seen = lambda rows, columns: torch.arange(columns) <= torch.arange(rows)[:, None] + start
    return model


# bug 10: context parallel, cp=2


def bug_10(model, mesh):
    context_parallel(model, mesh)
    model.block.attention.seen = lambda rows, columns: torch.ones(rows, columns).tril().bool()
    return model


# bug 11: context parallel, cp=2


class KeysOnly(Gathered):
    @staticmethod
    def backward(ctx, gradient):
        return own(gradient, ctx.dim), None


def bug_11(model, mesh):
    context_parallel(model, mesh)
    model.block.attention.all_keys = lambda x: KeysOnly.apply(x, 2)
    return model


# bug 12: data parallel, dp=2


def bug_12(model, mesh):
    model.count = whole_count
    on_gradients(model.parameters(), dist.all_reduce)
    return model


# bug 13: data parallel, dp=2


def bug_13(model, mesh):
    model.count = whole_count
    on_gradients([p for p in model.parameters() if p.dim() > 1], average)
    return model


# bug 14: data parallel, dp=2


def bug_14(model, mesh):
    on_gradients(model.parameters(), average)
    return model


# bug 15: data parallel, dp=2


def bug_15(model, mesh):
    model.count = whole_count
    backwards = list(model.parameters())[:: 1 if dist.get_rank() == 0 else -1]

    def reduce_all():
        for parameter in backwards:
            average(parameter.grad)

    model.words.weight.register_post_accumulate_grad_hook(lambda _: reduce_all())
    return model
