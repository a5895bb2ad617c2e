"""Tensors without memory: models that are made later, and values that other ranks have.

`making` has both ends, making models and making their values; read it first. A `recording` sees
what the constructor does, a `init_replay` has it and is replayed, `tensors` are its tensors until
then, which a `checkpoint` may have (`checkpoint_files` knows its kinds, `checkpoint_folder` that of
torch.distributed). `remote_batch` are tensors whose values other ranks have, and what may be asked
of them.
"""
