"""From a user's step to a flat program: Dynamo, tracing, arguments, results.

`capture` has the whole way; read it first, then its stops: `dynamo` finds the `forward`,
`arguments` (what goes in) and `results` (what comes out), `joint` (the gradients), in which
`kernel_numbers` are put into their places, `ports`, `captured`. Joint programs are kept on disk
(`capture_cache`) by what they are made of (`capture_key`), as data (`stored`, `spelling`).

The other door is `tracing`, which runs the step (`fake_run`) and gives a `traced` one; `places`
knows what the step reaches by itself, `executed` what code has run, `guards` what that can read and
must not change, `answers` what it is told of values, `open_sizes` for which sizes a trace holds,
`user_lines` where its operations come from, `data_writes` what `p.data = value` means.

`batch` cuts a call's arguments, `microbatch` joins its results, `reductions` and `rows/` derive
how, `first_call` compares a captured program with the step itself, `other_rows` a traced one on
other rows, both with what is `expected` of draws, `frozen` sees what a step draws outside of torch,
`presented` shows it parameters in another dtype, `untouched` puts back what a run has changed,
`again` what its Python leaves to later microbatches. `absent` are tensors whose values other ranks
have, a batch of rank 0 first, and what may be asked of them.

Models without memory: `deferred` has both ends, making them and making their values; a `recording`
sees what the constructor does, a `tape` has it and is replayed, `waiting` are its tensors until
then, which a `checkpoint` may have (`checkpoint_files` knows its kinds,
`checkpoint_folder` that of torch.distributed). All tensors, and all generators of numbers, are
found among what is `living`.
"""
