"""The attention of a CPU as that of a GPU, forward and backward."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from pfeife._torch import attention

_ATEN = torch.ops.aten


class MovedAttention:
    """Nodes of CUDA's attention in the place of a CPU's; the `values` of nodes say which kernel
    that is, and `tell` finds those of new nodes.

        before  o, l = for_cpu(q, k, v)            after  o, l, seed, offset = efficient(q, k, v)
                a, b, c = for_cpu_backward                a, b, c = efficient_backward
                    (g, q, k, v, o, l)                        (g, q, k, v, o, l, seed, offset)

    A mask is expanded, and padded where its rows are not aligned, as
    `scaled_dot_product_attention` does on a GPU.
    """

    def __init__(self, values: Mapping[fx.Node, Any], tell: Callable[[fx.Node], None]):
        self.values, self.tell = values, tell

    def forward(self, node: fx.Node, saves: bool) -> fx.Node:
        """In the place of a graph's last node; `saves` if a backward reads the sums of its rows.
        Raises ValueError for what CUDA has no kernel for."""
        given = attention.by_name(node.target, node.args, node.kwargs)
        known = {name: self._value(one) for name, one in given.items()}
        kernel = attention.cuda_kernel(known)
        if kernel is attention.FLASH and given["scale"] is None:
            given["scale"] = known["query"].shape[-1] ** -0.5
        elif kernel is not attention.FLASH:
            bias = None if given["attn_mask"] is None else self._mask(given, node, known)
            given |= {"attn_bias": bias, "compute_log_sumexp": saves}
        return self._instead(node, kernel, given)

    def backward(self, node: fx.Node) -> fx.Node:
        """The same for a backward. Raises ValueError if its forward is not in its graph."""
        given = attention.by_name(node.target, node.args, node.kwargs)
        saved: fx.Node = given["logsumexp"]
        forward = saved.args[0] if saved.target is operator.getitem else None
        if not isinstance(forward, fx.Node) or forward.target not in attention.SEEDS:
            raise ValueError("its forward is in another body: move the program before `fuse`")
        first = attention.by_name(forward.target, forward.args, forward.kwargs)
        at = attention.SEEDS[forward.target]
        offset = self._result(saved, forward, at[1], "offset")
        seed = self._result(saved, forward, at[0], "seed")
        given |= {"philox_seed": seed, "philox_offset": offset, "scale": first["scale"]}
        if forward.target is attention.FLASH:
            query, key = (self._size(given[name], -2, node) for name in ("query", "key"))
            given |= {"cum_seq_q": None, "cum_seq_k": None, "max_q": query, "max_k": key}
            return self._instead(node, attention.FLASH_BACKWARD, given)
        given |= {"grad_out_": given["grad_out"], "attn_bias": first["attn_bias"]}
        given |= {"grad_input_mask": [True, True, True, False]}  # a CPU's mask has no gradient
        return self._instead(node, attention.EFFICIENT_BACKWARD, given)

    def _value(self, one: Any) -> Any:
        return self.values[one] if isinstance(one, fx.Node) else one

    def _size(self, read: fx.Node, dim: int, like: fx.Node) -> Any:
        """A size of a value as a number, or as a node that tells it where it is open."""
        size = self.values[read].shape[dim]
        if type(size) is int:
            return size
        return self._added(like, _ATEN.sym_size.int, (read, dim))

    def _mask(self, given: Mapping[str, Any], node: fx.Node, known: Mapping[str, Any]) -> fx.Node:
        """A mask as the efficient kernel reads it: one for each head, rows aligned. Raises
        ValueError for one that is to be padded by what an open size says."""
        mask: fx.Node = given["attn_mask"]
        row = known["attn_mask"].shape[-1]
        if any(step % attention.MASK_ALIGNMENT for step in known["attn_mask"].stride()[:-1]):
            if type(row) is not int:
                raise ValueError("a mask whose rows are of an open size that is not aligned")
            more = attention.MASK_ALIGNMENT - row % attention.MASK_ALIGNMENT
            wide = self._added(node, _ATEN.constant_pad_nd.default, (mask, [0, more], 0.0))
            mask = self._added(node, _ATEN.slice.Tensor, (wide, -1, 0, row))
        sizes = [self._size(given["query"], dim, node) for dim in range(3)]
        sizes.append(self._size(given["key"], 2, node))
        return self._added(node, _ATEN.expand.default, (mask, sizes))

    def _result(self, saved: fx.Node, forward: fx.Node, at: int, name: str) -> fx.Node:
        """One more result of a forward, beside the one that is saved."""
        with saved.graph.inserting_after(saved):
            made = saved.graph.create_node(
                "call_function", operator.getitem, (forward, at), name=f"{forward.name}_{name}"
            )
        made.meta = dict(saved.meta)
        self.tell(made)
        return made

    def _added(self, like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        name = str(target).split(".")[1]  # as torch names it
        made = like.graph.create_node("call_function", target, args, kwargs, name=name)
        made.meta = dict(like.meta)
        self.tell(made)
        return made

    def _instead(self, node: fx.Node, target: Any, given: Mapping[str, Any]) -> fx.Node:
        made = self._added(node, target, *attention.in_order(target, given))
        node.graph.erase_node(node)
        return made
