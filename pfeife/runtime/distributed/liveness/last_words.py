"""Why a process ends, for the last lines that torchrun prints of all of them."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from pfeife.runtime.failure import PipelineError

_LONGEST = 2000  # letters


def tell_torchrun() -> None:
    """Writes the exception that ends this process, if one does, in a line to the file in which
    torchrun looks for it, unless that is written (by `torch.distributed.elastic`'s `record`)."""
    error, path = getattr(sys, "last_value", None), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error is None or not path or Path(path).exists():
        return
    is_pipeline_error = isinstance(error, PipelineError)
    text = f"pfeife: {error.failure}" if is_pipeline_error else f"{type(error).__name__}: {error}"
    line = " ".join(text.split())[:_LONGEST]
    extra = {"timestamp": str(int(time.time())), "py_callstack": line}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
