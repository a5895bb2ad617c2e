"""What AOTAutograd's tracing depends on beside the graph that it is given: torch itself, its
switches and the modes of the caller.

Whatever of this moves: a key has less in it, or there is none and nothing is kept on disk.
"""

import hashlib
import sys
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.fx.experimental._config

from pfeife._torch.kernel_numbers import as_torchs

_HOME = str(Path(torch.__file__).parent)
_STANDARD = str(Path(types.__file__).parent)
# Where a graph's functions are looked up, also by one another.
_NAMESPACES: tuple[Any, ...] = (
    *(torch, torch.functional, torch.nn.functional, torch.Tensor, torch._C._nn),
    torch.utils.checkpoint,
)
_TRACED = ("Autograd", "Composite", "Autocast", "Functionalize", "Python", "ADInplace")


def surroundings(devices: Collection[torch.device]) -> list[str]:
    """All that makes one graph another joint graph, a text each, for tensors on some devices.

    Raises ValueError where that cannot be told: a mode of the caller looks at every operation,
    saved tensors are packed, or somebody has replaced functions of torch's.
    """
    # A mode or a foreign kernel does what no text says, so there is no key at all.
    _check_modes()
    _check_kernels()
    return [
        f"torch {torch.__version__} {torch.version.git_version}",
        torch.__config__.show(),
        *(f"{name} {value}" for name, value in _switches()),
        *(f"autocast {kind} {_autocast(kind)}" for kind in sorted(_types(devices) | {"cpu"})),
        *(_device(device) for device in devices if device.type == "cuda"),
        torch._functorch.config.get_hash().hex(),
        torch.fx.experimental._config.get_hash().hex(),  # type: ignore[attr-defined]
        f"namespaces {_namespaces()}",
    ]


def is_torchs(function: Any) -> bool:
    """Whether a function is torch's own or built in, and does what it has always done."""
    function = as_torchs(function)
    if isinstance(function, types.FunctionType):
        return function.__code__.co_filename.startswith(_HOME)
    kinds = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
    if not isinstance(function, kinds):
        return False
    owner = getattr(function, "__self__", None) or getattr(function, "__objclass__", None)
    home = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or ""
    return home.split(".")[0] in ("torch", "_operator", "math", "builtins")


def is_operation(target: Any) -> bool:
    """Whether a function is one of torch's own operations, for one set of arguments or for all."""
    name = str(target)
    operation: Any = torch.ops
    for part in name.split("."):
        operation = getattr(operation, part, None)
    return operation is target and name.startswith(("aten.", "prims.", "pfeife."))


def is_higher_order(target: Any) -> bool:
    """Whether a function is an operation of torch's on graphs."""
    torchs = type(target).__module__.startswith("torch.")
    return torchs and isinstance(target, torch._ops.HigherOrderOperator)


def _check_modes() -> None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    transforms = torch._C._functorch.peek_interpreter_stack()
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    for active, what in (
        (hooks, "hooks of saved tensors are active"),
        (transforms, "it is called inside of a transform (torch.func)"),
        (modes, "a mode is active that sees every operation (or a default device)"),
    ):
        if active:
            raise ValueError(what)


def _check_kernels() -> None:
    """Raises ValueError if a library has replaced what tracing runs of torch's operations."""
    for name in torch.library._impls:
        kind = name.rpartition("/")[2]
        if kind == "PythonTLSSnapshot":  # torch's own (to_dense, 2.15)
            continue
        if name.startswith("aten/") and any(word in kind for word in _TRACED):
            raise ValueError(f"a library has registered {name}")


def _switches() -> Iterator[tuple[str, Any]]:
    yield "python", sys.version
    yield "gradients", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    yield "default dtype", torch.get_default_dtype()
    yield "threads", torch.get_num_threads()
    yield "anomalies", torch.is_anomaly_enabled()
    yield "matmul", torch.get_float32_matmul_precision()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    yield "deterministic", (torch.are_deterministic_algorithms_enabled(), warned)
    yield "einsum", (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy)
    yield "opt_einsum", getattr(torch.backends.opt_einsum.get_opt_einsum(), "__version__", None)
    for name in (
        *("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled"),
        *("_get_cudnn_sdp_enabled", "_get_overrideable_sdp_enabled", "_get_sdp_priority_order"),
        *("_get_math_sdp_allow_fp16_bf16_reduction", "_get_mkldnn_enabled"),
        *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic"),
        *("_get_nnpack_enabled", "_get_cudnn_allow_tf32", "_get_cublas_allow_tf32"),
    ):
        yield name, getattr(torch._C, name, lambda: None)()


def _types(devices: Collection[torch.device]) -> set[str]:
    return {device.type for device in devices} - {"meta"}


def _autocast(kind: str) -> tuple[Any, ...]:
    now = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return (*now, torch.is_autocast_cache_enabled())


def _device(device: torch.device) -> str:
    """Which GPU it is, where there is one: kernels are chosen by that."""
    return str(torch.cuda.get_device_properties(device)) if torch.cuda.is_available() else "none"


def _namespaces() -> str:
    """A digest of the functions by which torch's own are known. Raises ValueError for one that is
    not torch's."""
    digest = hashlib.sha256()
    for space in _NAMESPACES:
        for name, value in sorted(vars(space).items()):
            if name == "__slotnames__":  # what copyreg notes when a tensor is first pickled
                continue
            value = as_torchs(value)
            if isinstance(value, types.FunctionType):
                _check_origin(f"{space.__name__}.{name}", value)
                code = value.__code__
                digest.update(f"{name} {code.co_filename} {code.co_firstlineno}\n".encode())
            elif not isinstance(value, types.ModuleType):
                digest.update(f"{name} {getattr(value, '__name__', type(value))}\n".encode())
    return digest.hexdigest()


def _check_origin(name: str, function: types.FunctionType) -> None:
    file = function.__code__.co_filename
    # What torch deprecates it wraps by typing_extensions: such a function is of that file.
    is_original = file.startswith((_HOME, _STANDARD)) or Path(file).name == "typing_extensions.py"
    if not is_original:
        raise ValueError(f"{name} has been replaced by a function of {file}")
