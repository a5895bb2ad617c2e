"""What a pass has changed, in figures and as a difference of texts."""

from small import clusters, net

import pfeife
from pfeife import sched


def test_a_history_says_what_each_pass_changed():
    fused = clusters(net())
    plan = pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    history = pfeife.record(fused, pfeife.partition(plan), pfeife.insert_send_recv())
    start, staged, ranks = (one.totals for one in history)
    assert start.operations == staged.operations == ranks.operations
    assert start.calls == {"F": 4, "B": 4} and staged.calls == {"F": 2, "B": 2}
    assert len(start.cuts) == 3 and staged.cuts == (start.cuts[1],) == ranks.cuts
    assert ranks.sent == {(0, 1): 32, (1, 0): 32} and sum(ranks.sent.values()) == ranks.cuts[0]
    assert history[0].diff() == "" == pfeife.difference(fused, fused)
    changed = [line for line in history[2].diff().splitlines() if line[0] in "+-"][2:]
    assert any("receive" in line for line in changed)
    assert len(str(history).splitlines()) == 3 and "sent from 0 to 1 32 B" in str(history)
