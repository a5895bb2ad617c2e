"""A call of what was built.

`call` runs it, `autograd` does so for autograd; read these two first. `call_texts` are what ranks
compare of it before it runs, and `inplace_inputs` writes to arguments what the step changes of them
in place.
"""
