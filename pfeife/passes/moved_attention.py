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
        arguments = attention.by_name(node.target, node.args, node.kwargs)
        values = {name: self._value(argument) for name, argument in arguments.items()}
        kernel = attention.cuda_kernel(values)
        # torch always hands flash attention a number
        if kernel is attention.FLASH and arguments["scale"] is None:
            arguments["scale"] = values["query"].shape[-1] ** -0.5
        elif kernel is not attention.FLASH:
            bias = None if arguments["attn_mask"] is None else self._mask(arguments, node, values)
            arguments |= {"attn_bias": bias, "compute_log_sumexp": saves}
        return self._instead(node, kernel, arguments)

    def backward(self, node: fx.Node) -> fx.Node:
        """The same for a backward. Raises ValueError if its forward is not in its graph."""
        arguments = attention.by_name(node.target, node.args, node.kwargs)
        saved: fx.Node = arguments["logsumexp"]
        forward = saved.args[0] if saved.target is operator.getitem else None
        if not isinstance(forward, fx.Node) or forward.target not in attention.SEEDS:
            raise ValueError("its forward is in another body: move the program before `fuse`")
        first = attention.by_name(forward.target, forward.args, forward.kwargs)
        # The GPU's backward draws the dropout of its forward again: it is handed the seed and
        # offset that the forward has drawn by, results that a CPU's forward has not.
        at = attention.SEEDS[forward.target]
        offset = self._result(saved, forward, at[1], "offset")
        seed = self._result(saved, forward, at[0], "seed")
        arguments |= {"philox_seed": seed, "philox_offset": offset, "scale": first["scale"]}
        if forward.target is attention.FLASH:
            query, key = (self._size(arguments[name], -2, node) for name in ("query", "key"))
            arguments |= {"cum_seq_q": None, "cum_seq_k": None, "max_q": query, "max_k": key}
            return self._instead(node, attention.FLASH_BACKWARD, arguments)
        arguments |= {"grad_out_": arguments["grad_out"], "attn_bias": first["attn_bias"]}
        arguments |= {"grad_input_mask": [True, True, True, False]}  # a CPU's mask has no gradient
        return self._instead(node, attention.EFFICIENT_BACKWARD, arguments)

    def _value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else argument

    def _size(self, read: fx.Node, dim: int, like: fx.Node) -> Any:
        """A size of a value as a number, or as a node that tells it where it is open."""
        size = self.values[read].shape[dim]
        if type(size) is int:
            return size
        return self._added(like, _ATEN.sym_size.int, (read, dim))

    def _mask(
        self, arguments: Mapping[str, Any], node: fx.Node, values: Mapping[str, Any]
    ) -> fx.Node:
        """A mask as the efficient kernel reads it: one for each head, rows aligned. Raises
        ValueError for one that is to be padded by what an open size says."""
        mask: fx.Node = arguments["attn_mask"]
        row = values["attn_mask"].shape[-1]
        if any(step % attention.MASK_ALIGNMENT for step in values["attn_mask"].stride()[:-1]):
            if type(row) is not int:
                raise ValueError("a mask whose rows are of an open size that is not aligned")
            # padded and cut again: the same values, in rows that begin at aligned places
            more = attention.MASK_ALIGNMENT - row % attention.MASK_ALIGNMENT
            wide = self._added(node, _ATEN.constant_pad_nd.default, (mask, [0, more], 0.0))
            mask = self._added(node, _ATEN.slice.Tensor, (wide, -1, 0, row))
        sizes = [self._size(arguments["query"], dim, node) for dim in range(3)]
        sizes.append(self._size(arguments["key"], 2, node))
        return self._added(node, _ATEN.expand.default, (mask, sizes))

    def _result(self, saved: fx.Node, forward: fx.Node, at: int, name: str) -> fx.Node:
        """One more result of a forward, beside the one that is saved."""
        with saved.graph.inserting_after(saved):
            result = saved.graph.create_node(
                "call_function", operator.getitem, (forward, at), name=f"{forward.name}_{name}"
            )
        result.meta = dict(saved.meta)
        self.tell(result)
        return result

    def _added(self, like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        name = str(target).split(".")[1]  # as torch names it
        added = like.graph.create_node("call_function", target, args, kwargs, name=name)
        added.meta = dict(like.meta)
        self.tell(added)
        return added

    def _instead(self, node: fx.Node, target: Any, arguments: Mapping[str, Any]) -> fx.Node:
        replacement = self._added(node, target, *attention.in_order(target, arguments))
        node.graph.erase_node(node)
        return replacement
