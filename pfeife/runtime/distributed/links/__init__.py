"""How tensors go from rank to rank.

`connection` is a process group of some ranks; read it first. `warm_up` uses each once before a step
needs it, `channels` are the two ends of a message, `mapped` is memory that two processes of a node
see both, `sending` a message on its way. `reducing` adds gradients in one order, `buffers` are
where messages land, `collectives` what members of a group tell one another, `cuda_launch` says how
CUDA must launch kernels for all this, and `tangent_check` compares the gradients that arrive at the
loss.
"""
