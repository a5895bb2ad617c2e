"""How captured operations come apart."""

import torch
from torch._subclasses.fake_impls import op_implementations_dict

from pfeife._torch.aot import as_eager


def test_what_traces_as_eager_leaves_torch_as_it_was():
    aten = torch.ops.aten
    names = [name for name in dir(aten) if "upsample_" in name]
    packets = [getattr(aten, name) for name in names]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    before = [dict(operator.py_kernels) for operator in operators], dict(op_implementations_dict)
    with as_eager():
        assert [dict(operator.py_kernels) for operator in operators] != before[0]
    assert [dict(operator.py_kernels) for operator in operators] == before[0]
    assert dict(op_implementations_dict) == before[1]
