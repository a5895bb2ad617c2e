"""How values depend on the rows of the batch, operation by operation.

`propagate` runs a graph by rules, `table` says which rule an operation has, `value` what is known
of a value; read these in this order. The rules are in `axes` (where each dimension goes),
`elements`, `shapes` and `layers`; where there is none, `by_running` looks at a run. `reductions`
says what this means for a program's results.
"""
