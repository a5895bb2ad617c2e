"""What planner, account of memory and runtime share: from a schedule to messages between ranks.

`lower` puts sends, receives and reductions into a schedule, `verify` checks the result, `simulate`
and `predict` run it in thought. Read these in this order; `wiring`, `envelope` and `clocks` say
which values an action reads, how they travel, and when a sender knows that they have arrived.
`problem` is a schedule's task in bare numbers, `fit` moves it to other ranks.
"""
