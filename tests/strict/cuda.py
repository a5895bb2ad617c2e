"""What torch.cuda is while the model runs: its streams, and tensors of the CPU that say cuda."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from strict.gpu import Operation, Stream
from strict.host import Host

_here = threading.local()
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def host_here() -> Host:
    return _here.host


class Event:
    """A place of a stream."""

    device = CUDA

    def __init__(self, operation: Operation):
        self.operation = operation

    def query(self) -> bool:
        self.operation.stream.gpu.machine.settle()
        return self.operation.done

    def wait(self, stream: "CudaStream") -> None:
        stream.own.post("a wait for an event", self.operation)


class CudaStream:
    """As torch.cuda.Stream, of the rank that makes it."""

    def __init__(self, device: Any = None, own: Stream | None = None):
        self.own = own or host_here().gpu.stream("a stream of its own")

    def wait_stream(self, other: "CudaStream") -> None:
        self.own.post("a wait for a stream", other.own.post("an event"))

    def record_event(self) -> Event:
        return Event(self.own.post("an event"))


@contextlib.contextmanager
def _on(stream: CudaStream) -> Iterator[None]:
    gpu = host_here().gpu
    before, gpu.current = gpu.current, stream.own
    try:
        yield
    finally:
        gpu.current = before


class _Pretend(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU, and say that they are on CUDA. Who
    reads a value waits for the current stream."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func in _READS:
            gpu = host_here().gpu
            host_here().synchronize(gpu.current.post("all before a value is read"), "reads a value")
        places = {k: _cpu(v) for k, v in (kwargs or {}).items()}
        return func(*map(_cpu, args), **places)


_T = torch.Tensor
_READS = {_T.tolist, _T.item, _T.cpu, _T.__int__, _T.__bool__}


def _cpu(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def on_cuda(host: Host, job: Callable[[], Any]) -> Callable[[], Any]:
    """The job of a rank's thread, to which torch.cuda is the model's."""

    def run() -> Any:
        _here.host = host
        with _Pretend():
            return job()

    return run


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """While torch.cuda's streams are the model's; when memory is free is `happens`'s matter."""
    with (
        mock.patch.object(torch.Tensor, "record_stream", lambda value, stream: None),
        mock.patch.object(torch.cuda, "Stream", CudaStream),
        mock.patch.object(torch.cuda, "stream", _on),
        mock.patch.object(
            torch.cuda, "current_stream", lambda _: CudaStream(own=host_here().gpu.current)
        ),
    ):
        yield
