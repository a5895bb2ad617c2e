"""How values depend on the rows of the batch, operation by operation."""
