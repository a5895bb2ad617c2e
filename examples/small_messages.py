"""A pass of one's own: messages between ranks in bfloat16, or in int8 with a scale.

Run `python examples/small_messages.py`: it prints what is sent, and how far the gradients are off.
"""

import functools
import operator

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife
from pfeife import sched
from pfeife.ir.nodes import receive, send
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, check_pass

aten, to = torch.ops.aten, torch.ops.aten._to_copy.default
# Of the largest value of each gradient. A value is off by at most 2**-9 of itself in bfloat16, and
# by half a scale, 1/254 of the largest one, in int8; two messages each way add up.
WITHIN = {torch.bfloat16: 0.02, torch.int8: 0.06}


def narrow(make, value, dtype):
    """What is sent in place of a value."""
    if dtype != torch.int8:
        return [make(to, value, dtype=dtype)]
    largest = make(aten.amax.default, make(aten.abs.default, value))
    scale = make(aten.div.Scalar, make(aten.clamp_min.default, largest, 1e-30), 127)
    steps = make(aten.round.default, make(aten.div.Tensor, value, scale))
    return [make(to, steps, dtype=dtype), scale]


def small_messages(program: pfeife.Program, dtype: torch.dtype) -> pfeife.Program:
    """Messages whose values are all float32 are sent as another type, and widened where they
    arrive: the sender's stage computes the one, the receiver's the other."""
    parts = 2 if dtype == torch.int8 else 1

    def small(operation):
        make, args = operation.make, operation.args
        if operation.target is send and all_float(operation.node):
            values = tuple(one for value in args[0] for one in narrow(make, value, dtype))
            return make(send, values, *args[1:])
        part = operation.node.args[0] if operation.target is operator.getitem else None
        if part is not None and part.target is receive and all_float(part.args[0]):
            message, first = args[0], parts * args[1]
            found = make(to, make(operator.getitem, message, first), dtype=torch.float32)
            if parts == 1:
                return found
            return make(aten.mul.Tensor, found, make(operator.getitem, message, first + 1))
        return None

    return program.rewrite(small, of="calls")


def all_float(sent):
    return all(value.meta["val"].dtype == torch.float32 for value in sent.args[0])


def main() -> None:
    torch.manual_seed(0)
    model = GPT(context=16, width=32, depth=2)
    tokens, targets = torch.randint(256, (2, 8, 16))
    microbatches = list(zip(tokens.chunk(4), targets.chunk(4), strict=True))

    def loss_fn(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    flat = pfeife.capture(loss_fn, *microbatches[0])
    state = pfeife.state_of(flat, model)
    core = pfeife.cost.machine("cpu-core")
    clusters = pfeife.fuse()(flat)
    clusters = pfeife.annotate(pfeife.cost.estimate(clusters, core))(clusters)
    plan = sched.plan(clusters, machine=core, microbatches=4, stages=3, schedule="1f1b")
    ranks = pfeife.apply(plan)(clusters)
    print("float32", pfeife.totals(ranks))
    for dtype, within in WITHIN.items():
        one = functools.partial(small_messages, dtype=dtype)
        small = check_pass(one, ranks, state, microbatches, rounding=None, within=within)
        schedule = sched.verify_schedule(sched.lower(plan.schedule, small))
        found = LocalPipeline(small, schedule)(state, microbatches)
        assert_same(pfeife.evaluate(small, state, microbatches), found)  # bit for bit
        print(f"{dtype} {pfeife.totals(small)}: gradients within {within}")
    passes = {"ranks": [functools.partial(small_messages, dtype=torch.int8)]}
    check = WITHIN[torch.int8]  # at most so much may the pass change
    step = pfeife.compile(loss_fn, microbatches=4, stages=3, passes=passes, check=check)
    step(tokens, targets).backward()
    bytes_sent = sum(pfeife.totals(step.backend.compiled[0].program).sent.values())
    print(f"the compiled step sends {bytes_sent} bytes a microbatch: all within their bounds")


if __name__ == "__main__":
    main()
