"""What `fully_shard` leaves on modules beside their hooks."""

import inspect
from pathlib import Path
from typing import Any

from torch import nn

# Attributes of modules: marks, and dicts of who has changed a module, by keys that begin so. If
# they move: `fully_shard` has no way back, and the call refuses what is left of it.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_RECORDS = "__composable_api_state_key"
_THEIRS = "torch.distributed.fsdp."


def precision_of_shards(module: nn.Module) -> Any:
    """The `MixedPrecisionPolicy` that `fully_shard` was given for a module, None for one that it
    was given inside of another one of the same list."""
    from torch.distributed.fsdp import fully_shard

    return getattr(fully_shard.state(module), "_mp_policy", None)  # type: ignore[attr-defined]


def leave_fully_shard(module: nn.Module) -> None:
    """Makes a module what it was before `fully_shard`, in place, but for its parameters and the
    hooks around its forward."""
    # Where torch looks for what has changed a module. If it moves: state dicts of a model that was
    # under `fully_shard` by torch.distributed.checkpoint fail in torch's words.
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.__class__ = next(base for base in type(module).__bases__ if base is not FSDPModule)
    _module_state_mapping.pop(module, None)
    attributes = vars(module)
    for mark in _MARKS:
        attributes.pop(mark, None)
    # `register_fsdp_forward_method` puts a method of its own before that of the class.
    theirs = str(Path(inspect.getfile(FSDPModule)).parent)
    for name, value in [*attributes.items()]:
        code = getattr(getattr(value, "__func__", None), "__code__", None)
        if code is not None and code.co_filename.startswith(theirs):
            del attributes[name]
    for key in [key for key in attributes if key.startswith(_RECORDS)]:
        changed_by = attributes[key]
        for who in [who for who in changed_by if getattr(who, "__name__", who) == "fully_shard"]:
            del changed_by[who]
        if not changed_by:
            del attributes[key]
    saving, loading = module._state_dict_pre_hooks, module._load_state_dict_pre_hooks
    for hooks in (saving, loading, module._load_state_dict_post_hooks):
        for number, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith(_THEIRS):
                del hooks[number]
