"""The commands of the command line: one module each, imported when the command line starts.

Each has the name HELP, a function for its arguments, and a function that runs it and returns what
is printed; torch, and what else is slow to import, is imported by the latter. `plan` is the first
one to read; `compare` asks for many plans, which `side_by_side` makes, `fit` for those that memory
holds, `simulate` runs a schedule without a model, `show` tells what a file is, `explain` looks at a
step, `profile` runs one, `demo` trains one, `machines` lists the profiles, `bench_network` measures
links. `arguments` reads options, `models` finds the step that a command is about, `batches` what it
is called with, `programs` captures it, `file_kinds` reads files, `answers` writes them and says
what is printed.
"""
