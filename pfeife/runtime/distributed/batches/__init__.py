"""What ranks are given to compute on.

`meshes` reads which ranks are a pipeline; read it first. `loading` gives each its own rows, or all
what rank 0 reads; `rank0_broadcast` tells them what that is, `rank_zero` does so with a call's
arguments.
"""
