"""What may be asked of a compiled step.

`option_table` has a row for each option; read it first. `options` is all of them for one step,
`option_checks` what their rows check and convert by, `declared` the sizes that a caller says will
come. `options_typed` is for functions that take options as keywords, `brief` for what `help()`
shows of a class.
"""
