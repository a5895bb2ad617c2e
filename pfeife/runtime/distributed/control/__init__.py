"""How ranks agree, wait for one another and stop together: JSON, and no step's tensors.

`peers` has it all, `agreement` is what they compare before a call; read these first. `questions`
are what one asks another for, `posting` carries what is said, `packing` makes a message of tensors
that travel together. `script_point` counts calls, steps and loads, and says where a rank's script
rests, or in which collective of its own it waits.
"""
