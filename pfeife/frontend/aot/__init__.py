"""The joint graph of a step: its forward with its gradients, by AOTAutograd.

`joint` traces it; read it first. In it `kernel_numbers` are put into their places, and
`descriptors` and `ports` make a captured program of it.
"""
