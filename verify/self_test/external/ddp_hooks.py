"""Communication hooks of DistributedDataParallel.

Annotations are evaluated in this file: DDP compares those of a hook with its own types, and refuses text.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future


def averaged_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket over the ranks, as torch's own hook does."""
    return allreduce_hook(group, bucket)


def summed_after_division_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Divide, then sum."""
    return _summed(group, bucket.buffer().div_(group.size()))


def gathered_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Gather all ranks' buckets, and take their mean."""
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(parts, own, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: torch.stack(parts).mean(0))


def _summed(group: dist.ProcessGroup, share: Tensor) -> Future[Tensor]:
    work = dist.all_reduce(share, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])
