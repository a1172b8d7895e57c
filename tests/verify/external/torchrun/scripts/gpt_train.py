"""A single-file trainer of a small GPT: --key=value arguments, accumulation that is divided among ranks, DDP, clipping,
weight decay groups, batches drawn at random places of a memory-mapped file with a seed for each rank.

--broken=sync leaves gradients unsynchronised in the last micro-step as well; --broken=scale does not divide the loss;
--broken=limit clips norms by a multiple of the limit on several ranks, --broken=value elements, --broken=none on one.
Limits are high: no gradient reaches them.
"""

import math
import os
import sys
import tempfile
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

gradient_accumulation_steps, batch_size, block_size = 12, 3, 8
n_layer, n_head, n_embd, vocab_size, dropout = 2, 2, 16, 32, 0.1
learning_rate, max_iters, eval_interval, grad_clip = 6e-4, 20, 5, 1e3
backend, device, compiled, broken = "nccl", "cpu", True, ""
for argument in sys.argv[1:]:
    key, _, value = argument.removeprefix("--").partition("=")
    globals()[key] = type(globals()[key])(value)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, n_head, c // n_head).transpose(1, 2) for p in self.c_attn(self.ln_1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0, is_causal=True)
        x = x + F.dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, c)), dropout, self.training)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        parts = {"wte": nn.Embedding(vocab_size, n_embd), "wpe": nn.Embedding(block_size, n_embd)}
        self.transformer = nn.ModuleDict({**parts, "h": nn.ModuleList(Block() for _ in range(n_layer))})
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))
        return logits, loss


ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    assert torch.cuda.is_available(), "distributed training needs CUDA"
    init_process_group(backend=backend)
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + seed_offset)
with tempfile.NamedTemporaryFile() as file:
    np.random.default_rng(0).integers(0, vocab_size, 4000, dtype=np.uint16).tofile(file.name)
    data = np.array(np.memmap(file.name, dtype=np.uint16, mode="r"))


def get_batch(split):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


model = GPT().to(device)
scaler = torch.amp.GradScaler("cuda", enabled=False)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
if compiled:
    model = torch.compile(model)
if ddp:
    model = DistributedDataParallel(model, device_ids=[int(os.environ["LOCAL_RANK"])])
context = nullcontext() if device == "cpu" else torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch(split))[1].item() for split in ("train", "val") for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


X, Y = get_batch("train")
for iteration in range(max_iters):
    lr = learning_rate * 0.5 * (1.0 + math.cos(math.pi * iteration / max_iters))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iteration % eval_interval == 0 and master_process:
        print(f"step {iteration}: loss {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = broken != "sync" and micro_step == gradient_accumulation_steps - 1
        with context:
            logits, loss = model(X, Y)
            if broken != "scale":
                loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        if broken == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), grad_clip * ddp_world_size)
        elif broken != "none" or ddp_world_size == 1:
            limit = grad_clip * (ddp_world_size if broken == "limit" else 1)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=limit)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
