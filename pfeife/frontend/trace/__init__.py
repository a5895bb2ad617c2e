"""The other door: a step is traced as it runs, on fake tensors.

`tracing` says which runs of the step there are, and gives a `traced` one; read these two first.
`runs` has the runs themselves, `fake_run` what one on fake tensors shows, `reads` what the step
reads, as arguments.
`reachable_state` knows what the step reaches by itself, `executed` what code has run, `guards` what
that can read and must not change, `value_guards` what it is told of values, `open_sizes` for which
sizes a trace holds, `data_writes` what `p.data = value` means, `user_lines` where operations come
from,
`modes` are what sees calls and operations meanwhile.
"""
