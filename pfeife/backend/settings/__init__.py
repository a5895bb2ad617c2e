"""What may be asked of a compiled step.

`options` has all of it, with checks; read it first. `options_typed` has the types for those who
ask, `option_checks` checks decisions and functions that are options, `declared` has the sizes that
a caller says will come.
"""
