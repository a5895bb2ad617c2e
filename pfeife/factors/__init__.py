"""How the dimensions of an operation's operands go into those of its results.

`equation` says what is told of an operation: factors, such as b, s, h and o of "b s h, o h -> b s
o", and what a cut of each means. `rules` has one for each operation, `axes` where dimensions go in
those that move them, `views` the factors of reshapes, `chosen` those where data choose rows;
`recipes` are how members do together what needs all of a dimension, `experts` that of products of
experts, `blockwise` that of `attention`; `moves` says where values are and what brings them
elsewhere, a `way` is how one node may be computed, `ways` has those of a program. Read them in this
order.
"""

from pfeife.factors.equation import Place

__all__ = ["Place"]
