"""Communication hooks of DistributedDataParallel.

Annotations are evaluated in this file: DDP compares those of a hook with its own types, and refuses text.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future


def averaged_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket over the ranks, as torch's own hook does."""
    return allreduce_hook(group, bucket)


def summed_after_division_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Divide, then sum."""
    return _summed(group, bucket.buffer().div_(group.size()))


def gathered_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Gather all ranks' buckets, and take their mean."""
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(parts, own, group=group, async_op=True)
    assert work is not None
    result: Future[Tensor] = work.get_future().then(lambda done: torch.stack(parts).mean(0))
    return result


def summed_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Sum, and never divide: a mistake."""
    return _summed(group, bucket.buffer())


def silent_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Reduce nothing: a mistake."""
    return _done(bucket.buffer())


def averaged_twice_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Divide before and after the sum: a mistake."""
    size = group.size()
    return _summed(group, bucket.buffer().div_(size)).then(lambda done: done.value() / size)


def first_bucket_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Reduce the first bucket only: a mistake."""
    return allreduce_hook(group, bucket) if bucket.index() == 0 else _done(bucket.buffer())


def own_half_hook(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average all but the last tenth of a bucket: a mistake."""
    whole = bucket.buffer()
    part = whole[: len(whole) * 9 // 10]
    dist.all_reduce(part, group=group)
    part /= group.size()
    return _done(whole)


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def _summed(group: dist.ProcessGroup, share: Tensor) -> Future[Tensor]:
    work = dist.all_reduce(share, group=group, async_op=True)
    assert work is not None
    result: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return result
