"""What is captured beside the step itself.

`check_capture` compares a captured program with the step, `check_trace` a traced one on other rows;
read these first. Both compare `runs`. `capture_view` shows a step parameters in another dtype,
`side_effects` looks at what its Python leaves to later microbatches.
"""
