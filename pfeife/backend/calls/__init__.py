"""A call of what was built.

`call` runs it, `autograd` does so for autograd; read these two first. `loss_scale` knows with which
gradient of the loss, `inplace_inputs` writes to arguments what the step changes of them in place,
and `meter` measures a call.
"""
