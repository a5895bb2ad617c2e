"""The other door: a step is traced as it runs, on fake tensors.

`tracing` says which runs of the step there are, and gives a `traced` one; read these two first.
`runs` has the runs themselves, `fake_run` what one on fake tensors shows, `reads` what the step
reads, as arguments, `open_sizes` for which sizes a trace holds.
"""
