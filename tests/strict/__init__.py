"""NCCL's rules without a GPU: a model that runs the real transport, and says what waits for what.

`gpu` has streams, events and communicators, `host` the threads of ranks, one of which runs at a
time, `circle` what waits for what when nothing moves. `group` is a process group of this model,
`gloo` one for tensors of the CPU, `cuda` what torch.cuda is meanwhile, `ranks` runs pfeife's own
pipeline over them, `programs` has steps for it.
"""
