"""FullyShardedDataParallel, which flattens parameters, as in its tutorial: devices by number, mixed precision.

--original: the module keeps its parameters, as pieces of shards. --layers: each of the large layers by itself.
--broken: "clip" clips each rank's shards by their own norm, to a high limit, "ignored" leaves a layer to itself.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--original", action="store_true")
parser.add_argument("--layers", action="store_true")
parser.add_argument("--broken", default="")
args = parser.parse_args()
local = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
torch.cuda.set_device(local)
device = torch.device(local)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 7), torch.randint(0, 3, (64,)))
plain = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 3))
model = FullyShardedDataParallel(
    plain,
    auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100) if args.layers else None,
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    device_id=torch.cuda.current_device(),
    use_orig_params=args.original,
    ignored_modules=[plain[2]] if args.broken == "ignored" else None,
)
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in DataLoader(data, 8, sampler=DistributedSampler(data)):
    begin.record()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x.to(device)), y.to(local)).backward()
    if args.broken == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    else:
        model.clip_grad_norm_(100.0)
    optimizer.step()
    end.record(torch.cuda.current_stream())
    end.synchronize()
    print(torch.cuda.get_device_name(local), begin.elapsed_time(end), "ms")
dist.destroy_process_group()
