"""How tensors go from rank to rank.

`connection` is a process group of some ranks; read it first. `connecting` uses each once before a
step needs it, `ends` are the two ends of a message, `mapped` is memory that two processes of a node
see both, `sending` a message on its way. `reducing` adds gradients in one order, `buffers` are
where messages land, `launching` says how CUDA must launch kernels for all this, and `arriving`
compares the gradients that arrive at the loss.
"""
