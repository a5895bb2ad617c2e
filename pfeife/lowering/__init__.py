"""What planner, account of memory and runtime share: from a schedule to messages between ranks.

`lower` puts sends, receives and reductions into a schedule, `replay` runs ranks against one
another: `verify` checks so, `simulate` and `predict` tell the time, `critical` what the step waits
for. Read these in this order; `wiring`, `envelope`, `channel` and `clocks` say which values an
action reads, how they travel, what is posted ahead, and when a sender knows that they have arrived.
`buckets` has what is reduced together, `telling` what members are told of parameters. `problem` is
a schedule's task in bare numbers, `coverage` checks that a schedule does all that a program needs.
"""
