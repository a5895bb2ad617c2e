"""How graphs are changed: always on copies.

`copying` copies them node by node, of which all passes are made; read it first. `rewrite` edits
copies as fx's own tools do, `infer_values` finishes what somebody has edited, `absorb` puts nodes
that stand between calls into bodies.
"""
