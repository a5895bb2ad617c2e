"""What `fully_shard` leaves on modules beside their hooks."""

from typing import Any

from torch import nn

# torch tells the module's class, hooks of its state and a record of who has changed it. If they
# move: `fully_shard` has no way back, and models are refused as before it was called on them.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
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
    for key in (STATE_KEY, REGISTRY_KEY):
        changed_by = attributes.get(key, {})
        for who in [who for who in changed_by if getattr(who, "__name__", who) == "fully_shard"]:
            del changed_by[who]
        if not changed_by:
            attributes.pop(key, None)
    saving, loading = module._state_dict_pre_hooks, module._load_state_dict_pre_hooks
    for hooks in (saving, loading, module._load_state_dict_post_hooks):
        for number, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith(_THEIRS):
                del hooks[number]
