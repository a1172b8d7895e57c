"""Operators whose traces reach every transfer rule: a fifth of the time that all operators take, which `-m long` tries.

`test_samples_lead_to_every_rule` says when a new rule asks for another one.
"""

from __future__ import annotations

COVER = frozenset(
    """
    _log_softmax _native_batch_norm_legit_no_training _safe_softmax _softmax _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm_interface adaptive_avg_pool1d
    adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d addcdiv addcmul addmv addr all all.dim all.dims amin
    amax angle any any.dim any.dims arange arange.start arange.start_step arcsin argmax argmin argsort.stable avg_pool2d
    avg_pool3d baddbmm binary_cross_entropy binary_cross_entropy_with_logits bitwise_and.Scalar bucketize.Tensor
    chunk col2im complex conj_physical conv1d conv3d.padding copy count_nonzero count_nonzero.dim_IntList
    cross_entropy_loss cummax cummin cumsum cumulative_trapezoid.x deg2rad diagonal diagonal_scatter diff dot einsum
    embedding eye eye.m fft_fft fft_ifftshift fill.Tensor floor_divide.Scalar floor_divide full full_like gelu glu
    group_norm hardshrink hardsigmoid hardswish huber_loss imag index.Tensor index_copy index_fill.int_Tensor
    index_reduce kthvalue layer_norm leaky_relu lift lift_fresh lift_fresh_copy linalg__powsum linalg_matmul
    linalg_matrix_norm linalg_matrix_norm.str_ord linear linspace log_sigmoid logcumsumexp logit logsumexp mH
    masked_fill.Tensor masked_scatter matmul max max.dim max_pool1d_with_indices max_pool3d median median.dim min
    min.dim mish mode mse_loss nan_to_num nanmedian.dim nanquantile.scalar nansum native_batch_norm
    native_group_norm native_layer_norm new_full new_ones nll_loss2d_forward nll_loss_forward
    norm.ScalarOpt_dim_dtype norm_except_dim pad pixel_unshuffle polar prod prod.dim_int rad2deg relu relu6
    remainder.Scalar rnn_tanh_cell rsub.Scalar rsub.Tensor scaled_dot_product_attention scatter.value
    scatter_reduce.two select_scatter selu sigmoid silu slice_scatter smooth_l1_loss soft_margin_loss softplus
    softshrink special_logsumexp split.sizes squeeze squeeze.dims std std_mean tile topk trapezoid.x tril
    tril_indices triu triu_indices unbind.int unfold upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vdot zero
    nnscaler.ce_weight nnscaler.running_statistic prelu
    """.split()
)
