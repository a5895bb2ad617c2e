"""A step as Dynamo or a trace gives it.

`step_graph` has a graph of a microbatch, read it first, and `batched_graph` one of the whole batch.
`graph_breaks` is for a step which Dynamo has broken into several.
"""
