"""What is captured beside the step itself.

`first_call` compares a captured program with the step, `other_rows` a traced one on other rows;
read these first. Both take what is `expected` of draws; `frozen` sees what a step draws outside of
torch, `presented` shows it parameters in another dtype, `untouched` puts back what a run has
changed, `again` looks at what its Python leaves to later microbatches.
"""
