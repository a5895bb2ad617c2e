"""Which rule is for which operation."""

from typing import Any

import torch

from pfeife.factors import axes as places
from pfeife.frontend.rows import axes, elements, layers, shapes
from pfeife.frontend.rows.value import RowOperation, Rule, Stuck, moves


def rule_of(operation: RowOperation) -> Rule:
    """The rule of an operation. Raises Stuck if there is none."""
    if operation.node.op == "get_attr":
        return elements.constant
    if operation.name == "getitem":
        return _item
    operands = operation.operands()
    if not operands:
        return elements.made
    # No rows in, no rows out, whatever the function. Arithmetic still has its rules: in
    # `weight / len(x)` a number counts rows, which `fixed` does not look at.
    if operation.name not in ARITHMETIC and not any(moves(rows) for _, rows in operands):
        return elements.fixed
    if operation.name in RULES:
        return RULES[operation.name]
    if "reduction" in operation.arguments:
        return layers.loss
    if torch.Tag.pointwise in getattr(_target(operation), "tags", ()):
        return elements.pointwise
    raise Stuck


def _target(operation: RowOperation) -> Any:
    return (
        operation.node.target if hasattr(operation.node.target, "tags") else operation.node.args[0]
    )


def _item(operation: RowOperation) -> Any:
    source, index = operation.node.args
    rows = operation.rows_of[source]  # type: ignore[index]
    return rows[index] if isinstance(rows, tuple) else rows  # type: ignore[index]


def _table(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


ARITHMETIC: dict[str, Rule] = {  # also of numbers and of what is the same in every microbatch
    "add": elements.add,
    "sub": elements.sum_of,
    "rsub": elements.sum_of,
    "mul": elements.product,
    "div": elements.quotient,
}
RULES: dict[str, Rule] = ARITHMETIC | {
    **_table(
        "native_batch_norm cudnn_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _batch_norm_with_update_functional "
        "_native_batch_norm_legit_no_training _batch_norm_no_update",
        layers.batch_norm,
    ),
    **_table("clone alias detach _to_copy lift_fresh_copy lift_fresh neg", elements.same),
    **_table("where masked_fill", elements.chosen),
    **_table("index_put", elements.put),
    **_table("clamp clamp_min maximum", elements.clamped),
    **_table("sum", axes.totalled(mean=False)),
    **_table("mean", axes.totalled(mean=True)),
    **_table(
        "amax amin max min argmax argmin var std var_mean std_mean logsumexp any all prod "
        "linalg_vector_norm norm median count_nonzero",
        axes.each_row(places.reduced),
    ),
    **_table(
        "_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort topk flip roll "
        "kthvalue index_select glu",
        axes.each_row(places.along),
    ),
    **_table("native_layer_norm _fused_rms_norm rms_norm", layers.normalised),
    **_table("view _unsafe_view reshape _reshape_alias flatten unflatten", shapes.reshaped),
    **_table("permute", axes.moved(places.permuted)),
    **_table("transpose t", axes.moved(places.transposed)),
    **_table("unsqueeze", axes.moved(places.unsqueezed)),
    **_table("squeeze", axes.moved(places.squeezed)),
    **_table("expand repeat", shapes.expanded),
    **_table(
        "select slice unbind split split_with_sizes narrow unsafe_split", axes.moved(places.picked)
    ),
    **_table("cat stack", shapes.joined),
    **_table("constant_pad_nd", shapes.padded),
    **_table("slice_scatter select_scatter", shapes.written),
    **_table("copy", shapes.copied),
    **_table("new_zeros new_ones new_full new_empty", elements.made),
    **_table("zeros_like ones_like full_like empty_like rand_like randn_like fill", shapes.like),
    **_table(
        "native_dropout bernoulli dropout hardswish log_sigmoid_forward polar complex "
        "_prelu_kernel hardswish_backward hardsigmoid_backward elu_backward softplus_backward "
        "leaky_relu_backward hardtanh_backward mish_backward",
        elements.pointwise,  # which torch does not mark so
    ),
    **_table("uniform normal_functional exponential", shapes.drawn),
    **_table("embedding", shapes.looked_up),
    **_table("gather scatter scatter_add", shapes.gathered),
    **_table("index", shapes.indexed),
    "mm": layers.contracted("self", "mat2", "ij,jk->ik"),
    "addmm": layers.contracted("mat1", "mat2", "ij,jk->ik", added="self"),
    "bmm": layers.contracted("self", "mat2", "bij,bjk->bik"),
    "baddbmm": layers.contracted("batch1", "batch2", "bij,bjk->bik", added="self"),
    "mv": layers.contracted("self", "vec", "ij,j->i"),
    "dot": layers.contracted("self", "tensor", "i,i->"),
    "_cdist_forward": layers.distances,
    "_euclidean_dist": layers.distances,
    **_table(
        "convolution native_group_norm max_pool2d_with_indices "
        "max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d reflection_pad1d "
        "reflection_pad2d replication_pad1d replication_pad2d pixel_shuffle pixel_unshuffle "
        "im2col col2im upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        layers.batchwise,
    ),
    **_table(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math",
        layers.attended,
    ),
    **_table("mkldnn_rnn_layer", layers.recurrent),
    **_table("nll_loss_forward nll_loss2d_forward", layers.nll_loss),
}
