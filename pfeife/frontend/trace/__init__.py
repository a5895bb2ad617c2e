"""The other door: a step is traced as it runs, on fake tensors.

`tracing` runs the step (`fake_run`) and gives a `traced` one; read these two first.
`reachable_state` knows what the step reaches by itself, `executed` what code has run, `guards` what
that can read and must not change, `value_guards` what it is told of values, `open_sizes` for which
sizes a trace holds, `data_writes` what `p.data = value` means, `user_lines` where operations come
from.
"""
