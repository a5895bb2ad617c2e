"""FLOPs of products by groups of rows, each with a matrix of its own, as experts have them."""

from typing import Any

import torch


def grouped_flops(first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Two for each number of a row and each column of its group's matrix, whatever groups the rows
    are in: [rows, k] x [groups, k, n], [k, rows] x [rows, n], or with columns in groups,
    [groups, m, k] x [k, columns]."""
    if first.dim() == 3 and second.dim() == 2:
        return int(2 * first.shape[1] * second.numel())
    return int(2 * first.numel() * second.shape[-1])


def _backward_flops(rows: Any, matrices: Any, *_: Any, **__: Any) -> int:
    """Twice as many, for the gradients of both factors."""
    return 2 * grouped_flops(rows, matrices)


def formulas() -> dict[Any, Any]:
    """By operation: torch's own, and where transformers is imported that which it takes for other
    types than bfloat16."""
    aten = torch.ops.aten
    by_operation: dict[Any, Any] = {
        aten._grouped_mm: grouped_flops,
        aten._scaled_grouped_mm: grouped_flops,
    }
    fallbacks = {
        "grouped_mm_fallback": grouped_flops,
        "grouped_mm_fallback_backward": _backward_flops,
    }
    namespace = torch.ops.transformers  # whose version 5.17 has the first one alone
    return by_operation | {
        getattr(namespace, n): flops for n, flops in fallbacks.items() if hasattr(namespace, n)
    }
