"""What all steps of a backend share.

`context` has it: options, what builds, the clock, and what was built; read it first. `meter`
measures calls, `reporting` shows what became of a step.
"""
