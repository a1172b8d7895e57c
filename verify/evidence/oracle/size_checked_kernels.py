"""Run a function on shapes that may not fit by kernels that check the sizes of what they are given, or on meta tensors.

A CPU kernel that does not check its sizes reads or writes beyond its tensors, and takes the process with it
(`_weight_norm`, fused attention). A function that runs only kernels of the list below raises instead. Shapes for any
other one are tried on the meta device first, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from op_registry.spec import OperatorSpec

from nnscaler.runtime.communication.communicator import ProgramError
from verify.evidence.inputs.concrete_call import function_of
from verify.evidence.inputs.cut_and_join_operands import local_shape, ranks_of
from verify.evidence.inputs.meta_preflight import tried_on_meta
from verify.evidence.operator_trace import Observer
from verify.evidence.oracle.compare_partition import AXES, Partition, ShardRaised
from verify.evidence.oracle.run_whole_operator import WholeRun

CHECKED = frozenset(
    """
    mm addmm bmm baddbmm mv dot addmv linear matmul convolution
    view _unsafe_view reshape _reshape_alias expand permute transpose t squeeze unsqueeze select slice split
    split_with_sizes chunk unbind as_strided alias detach clone contiguous _to_copy copy lift_fresh cat stack repeat
    glu _safe_softmax
    sum mean amax amin max min argmax argmin prod var std var_mean std_mean logsumexp norm linalg_vector_norm any all
    _softmax _log_softmax cumsum cumprod sort topk flip roll tril triu diagonal constant_pad_nd unfold
    gather index index_select embedding scatter scatter_add index_add masked_fill where
    native_layer_norm native_group_norm nll_loss_forward nll_loss2d_forward
    zeros ones full empty arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    scalar_tensor fill zero _fused_rms_norm is_same_size
    """.split()
)


def _checks(overload: Any) -> bool:
    name = overload.overloadpacket.__name__.removesuffix("_")
    return overload.namespace == "aten" and (name in CHECKED or torch.Tag.pointwise in overload.tags)


def runs_checked(run: Callable[[], object]) -> bool:
    """Return whether a function runs only kernels that check their sizes. Raises what the function raises."""
    checked: list[bool] = []
    with Observer(before=lambda overload: checked.append(_checks(overload))):
        run()
    return all(checked)


@contextmanager
def checked_kernels() -> Iterator[None]:
    """Run attention by its plain formula, whose products check their sizes."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def raised_on_meta(spec: OperatorSpec, whole: WholeRun, partition: Partition) -> ShardRaised | None:
    """Try the shapes of the first and the last shard on meta tensors, and return what does not fit.

    A kernel that does not check its sizes could end the process.
    """
    tensors = whole.concrete.tensors
    function = function_of(partition.call.operator, spec)
    ranks = ranks_of(partition.parts)
    for rank in (ranks[0], ranks[-1]):
        shapes = [local_shape(t.shape, lay, rank) for t, lay in zip(tensors, partition.inputs, strict=True)]
        more = partition.random_arguments(rank) if spec.random else {}
        described = [(shape, t.dtype) for shape, t in zip(shapes, tensors, strict=True)]
        tried = tried_on_meta(function, partition.call, described, dict(zip(AXES, rank, strict=False)), more)
        if isinstance(tried, Exception):
            return ShardRaised(rank, shapes, tried)
    return None


# Checks before kernels of torch that do not check what they are given.
# A wrong program may hand them anything, and what they then do is not what a deployment would do.

_ATTENTION = frozenset({"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"})
_ATTENTION_CALLS = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
# On CPUs, these read or write past the end of a tensor that is too short; on the meta device they refuse it.
_REFUSED_BY_META = frozenset(
    {"_weight_norm", "_weight_norm_interface", "native_batch_norm", "_native_batch_norm_legit_no_training"}
)


class CheckedKernels(TorchFunctionMode):
    """While it is active in a thread, calls of these kernels with sizes that do not fit raise ProgramError.

    Attention: on CPUs torch takes the number of keys from the value. With a longer one it reads past the end of the
    key, and in backward it writes there. Where the key is a slice of a longer one, the rows that it lacks lie just
    there: the loss would be right. Other devices, and torch's own fallback, raise.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # which reads no names of operators, and would end its graph here
            if func in _ATTENTION_CALLS:
                _check_attention(*args[1:3], **{k: v for k, v in named.items() if k in ("key", "value")})
            return func(*args, **named)
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in _ATTENTION:
            _check_attention(*args[1:3], **{k: v for k, v in named.items() if k in ("key", "value")})
        elif name in _REFUSED_BY_META:
            _check_on_meta(name, func, args, named)
        return func(*args, **named)


def _check_attention(key: Any, value: Any) -> None:
    if isinstance(key, Tensor) and isinstance(value, Tensor) and min(key.dim(), value.dim()) > 1:
        keys, values = key.shape[-2], value.shape[-2]
        if keys != values:
            message = f"attention of {keys} keys and {values} values: {tuple(key.shape)}, {tuple(value.shape)}"
            raise ProgramError(f"{message}; torch does not check this on CPUs")


def _check_on_meta(name: str, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    try:
        with torch.no_grad():
            func(*map(_without_data, args), **{k: _without_data(v) for k, v in named.items()})
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(a.shape)) for a in (*args, *named.values()) if isinstance(a, Tensor))
        raise ProgramError(f"{name} of {shapes}: {error}; torch does not check this on CPUs") from error


def _without_data(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, Tensor) else value
