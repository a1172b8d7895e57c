"""Pipelining in the style of its tutorial: each rank keeps the layers of its stage, and a schedule runs micro-batches.

--broken: "scale" does not divide the gradients by the number of micro-batches, "layer" leaves one layer out, "clip"
clips each stage by its own norm (--clip: all of them by theirs, to a limit that no gradient reaches). --added:
gradients of micro-batches are added up, on any number of ranks. --traced: torch cuts the stages out of the whole model.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe")
parser.add_argument("--broken", default="")
parser.add_argument("--clip", action="store_true")
parser.add_argument("--added", action="store_true")
parser.add_argument("--traced", action="store_true")
parser.add_argument("--layers", type=int, default=12)
args = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}") if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group()
words, size, layers, chunks = 32, 8, args.layers, 4


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, size)
        self.layers = nn.ModuleDict(
            {str(i): nn.TransformerEncoderLayer(size, 2, 16, batch_first=True) for i in range(layers)}
        )
        self.norm, self.output = nn.LayerNorm(size), nn.Linear(size, words)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm else h
        return self.output(h).clone() if self.output else h


torch.manual_seed(0)
model = Transformer()
each = layers // world_size
mine = range(rank * each, (rank + 1) * each)
for name in () if args.traced else list(model.layers):
    if int(name) not in mine or (args.broken == "layer" and int(name) == 1 and world_size > 1):
        del model.layers[name]
if rank > 0 and not args.traced:
    model.tok_embeddings = None
if rank < world_size - 1 and not args.traced:
    model.norm = model.output = None
model.to(device)
if args.traced:
    cuts = {f"layers.{each * number}": SplitPoint.BEGINNING for number in range(1, world_size)}
    traced = pipeline(model, (torch.zeros(2, 6, dtype=torch.long, device=device),), split_spec=cuts)
    stage = traced.build_stage(rank, device)
    model = stage.submod
else:
    stage = PipelineStage(model, rank, world_size, device)


def tokenwise_loss_fn(outputs, targets):
    return nn.CrossEntropyLoss()(outputs.reshape(-1, words), targets.reshape(-1))


kind = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
scale = not args.added and (args.broken != "scale" or world_size == 1)
schedule = kind(stage, n_microbatches=chunks, loss_fn=tokenwise_loss_fn, scale_grads=scale)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    x = torch.randint(0, words, (8, 6))
    y = torch.randint(0, words, (8, 6))
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x.to(device))
    elif rank == world_size - 1:
        losses = []
        output = schedule.step(target=y.to(device), losses=losses)
        print(f"losses: {losses}")
    else:
        schedule.step()
    if args.clip or args.broken == "clip":
        gradients = [parameter.grad for parameter in model.parameters()]
        square = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if args.broken != "clip":
            dist.all_reduce(square)
        torch._foreach_mul_(gradients, (100 / square.sqrt()).clamp(max=1))
    optimizer.step()
dist.destroy_process_group()
