"""What a step does while it runs in eager or on fake tensors, seen from outside.

`modes` are what sees calls and operations meanwhile, `user_lines` where they come from, `executed`
what code has run; read these first. `reachable_state` knows what the step reaches by itself,
`guards` what its code can read and must not change, `value_guards` what it is told of values,
`data_writes` what `p.data = value` means. `foreign_generators` sees what a step draws outside of
torch, `deterministic` makes draws that two runs share, `restore` puts back what a run has changed.
Tensors and generators of numbers that no name leads to are found among what is `gc_objects`.
"""
