"""A call of what was built.

`call` runs it, `function` does so for autograd; read these two first. `loss_scale` knows with which
gradient of the loss, `changed` writes to arguments what the step changes of them in place, `meter`
measures a call.
"""
