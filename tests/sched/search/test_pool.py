"""The pool keeps the best of every origin."""

from pfeife.sched.search.pool import Candidate, Origin, Pool


def test_the_pool_keeps_the_best_of_every_origin():
    pool = Pool()
    for index in range(50):
        pool.keep(Candidate(1.0 + index / 100, [], Origin.RULE))
    pool.keep(Candidate(9.0, [], Origin.PATTERN))
    pool.keep(Candidate(9.0, [], Origin.PATTERN))
    assert [one.seconds for one in pool.of(Origin.PATTERN)] == [9.0]
    assert [one.seconds for one in pool.varied(3)] == [1.0, 9.0, 1.01]
