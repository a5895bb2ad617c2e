"""Programs told apart by what they compute."""

import functools

from small import Block, clusters, net, sigmoids

from pfeife.ir.digest import program_digest


def test_a_plan_knows_its_program():
    """By what is computed of what, whatever the batch; not by whether backwards are split."""
    digest = program_digest(clusters())
    assert program_digest(clusters(rows=5)) == digest == program_digest(clusters(split=True))
    deeper, other = net(), net()
    deeper.model.blocks.append(Block())
    other.model.forward = functools.partial(sigmoids, other.model)
    found = {digest, *(program_digest(clusters(one)) for one in (deeper, other))}
    assert len(found) == 3
