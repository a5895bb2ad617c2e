"""What is captured beside the step itself.

`check_capture` compares a captured program with the step, `check_trace` a traced one on other rows;
read these first. Both compare `runs`, and take what is `deterministic` of draws;
`foreign_generators` sees what a step
draws outside of torch, `capture_view` shows it parameters in another dtype, `restore` puts back
what a run has changed, `side_effects` looks at what its Python leaves to later microbatches.
"""
