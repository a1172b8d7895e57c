"""FSDP2 in the style of its tutorial: a transformer on the meta device, sharded layer by layer, then initialised.

--evaluate: looks at other rows before each step, which leaves the root's parameters gathered.
--broken: "norm" leaves the final norm and head unsharded and unreduced.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, 4, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))

    def reset_parameters(self):
        self.attention._reset_parameters()
        for part in (self.norm, self.attention.out_proj, self.up, self.down):
            part.reset_parameters()


class Transformer(nn.Module):
    def __init__(self, words=40, size=16, layers=2, length=8):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, size), nn.Embedding(length, size)
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, words, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))

    def reset_parameters(self):
        for part in (self.tokens, self.positions, self.norm, self.output, *self.layers):
            part.reset_parameters()


def main(args):
    rank = int(os.environ["LOCAL_RANK"])
    if not torch.accelerator.is_available():
        raise SystemExit("this example needs an accelerator")
    device_type = torch.accelerator.current_accelerator()
    device = torch.device(f"{device_type}:{rank}")
    torch.accelerator.set_device_index(rank)
    backend = torch.distributed.get_default_backend_for_device(device)
    torch.distributed.init_process_group(backend=backend, device_id=device)
    torch.manual_seed(0 if args.same_rows else rank)
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    if args.broken != "norm":
        fully_shard(model)
    model.to_empty(device=device)
    if args.broken == "norm":
        torch.manual_seed(0)
    model.reset_parameters()
    torch.manual_seed(0 if args.same_rows else rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        x = torch.randint(0, 40, (4, 8), device=device)
        if args.evaluate:
            with torch.no_grad():
                model(torch.zeros(1, 8, dtype=torch.long, device=device))
        loss = model(x).sum()
        loss.backward()
        if args.broken != "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--same-rows", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--broken", default="")
    main(parser.parse_args())
