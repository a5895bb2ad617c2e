"""Threads that look after a rank beside its script."""

import threading
from collections.abc import Callable


def started(name: str, work: Callable[..., object], *args: object) -> threading.Thread:
    """A thread that does some work, and that the end of the program does not wait for."""
    thread = threading.Thread(target=work, args=args, name=f"pfeife {name}", daemon=True)
    thread.start()
    return thread
