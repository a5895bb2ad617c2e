"""What `fully_shard` leaves on modules beside their hooks."""

from typing import Any

from torch import nn

# Attributes of modules: marks, and dicts of who has changed a module, by keys that begin so. If
# they move: `fully_shard` has no way back, and the call refuses what is left of it.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_RECORDS = "__composable_api_state_key"
_THEIRS = "torch.distributed.fsdp."


def precision_of_shards(module: nn.Module) -> Any:
    """The `MixedPrecisionPolicy` that `fully_shard` was given for a module."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)._mp_policy  # type: ignore[attr-defined]


def leave_fully_shard(module: nn.Module) -> None:
    """Makes a module what it was before `fully_shard`, in place, but for its parameters and the
    hooks around its forward."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.__class__ = next(base for base in type(module).__bases__ if base is not FSDPModule)
    attributes = vars(module)
    for mark in _MARKS:
        attributes.pop(mark, None)
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
