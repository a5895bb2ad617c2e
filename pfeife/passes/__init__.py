"""Passes: each a factory that binds its options and returns a function of a program.

Read them as a program meets them: `precision`, `defer_batch_norm` and `move_to_device` (if asked
for; `moved_attention` is a part of the last), `shard` (for which `member_ways` decides how each
node is computed, `member_graph` writes the graph, `member_arguments` those of its nodes,
`member_layouts` knows how values lie in memory),
`fuse`, `annotate`, `partition`, `split_backward`, `send_recv`, `dp_wrap` (both make `reductions`),
`overlap` (of the programs that `shard` has made), `place`; `recompute` is a part of `partition`,
`compose` puts passes together and keeps what each has made, `apply` puts together those that a plan
decides, `changes` says what one has changed.
"""

from pfeife.ir.editing.absorb import absorb
from pfeife.passes.annotate import annotate
from pfeife.passes.apply import apply, passes_of
from pfeife.passes.changes import Totals, difference, totals
from pfeife.passes.compose import History, Pass, compose, record
from pfeife.passes.defer_batch_norm import defer_batch_norm
from pfeife.passes.dp_wrap import dp_wrap
from pfeife.passes.fuse import fuse
from pfeife.passes.move_to_device import move_to_device
from pfeife.passes.overlap import overlap
from pfeife.passes.partition import partition
from pfeife.passes.place import place
from pfeife.passes.precision import accumulate_in, master_weights
from pfeife.passes.send_recv import insert_send_recv
from pfeife.passes.shard import shard
from pfeife.passes.split_backward import join_backward, split_backward

__all__ = [
    "History",
    "Pass",
    "Totals",
    "absorb",
    "accumulate_in",
    "annotate",
    "apply",
    "compose",
    "defer_batch_norm",
    "difference",
    "dp_wrap",
    "fuse",
    "insert_send_recv",
    "join_backward",
    "master_weights",
    "move_to_device",
    "overlap",
    "partition",
    "passes_of",
    "place",
    "record",
    "shard",
    "split_backward",
    "totals",
]
