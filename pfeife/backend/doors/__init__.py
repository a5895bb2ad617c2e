"""How a step becomes a graph: by Dynamo, or by a trace where Dynamo refuses.

`invocation` is a call on its way, `doorway` what both doors have in common; read these first. Then
`by_dynamo`, which hands over graphs while it runs the step, and `by_trace`, which runs the step on
fake tensors.
"""
