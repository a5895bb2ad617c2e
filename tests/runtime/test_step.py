"""A step: its parts, and where an operation fails."""

import pytest
from programs import pipelined

from pfeife.testing import assert_same


def test_the_line_of_the_model():
    """An operation that fails is named by the model's own line."""
    pipeline, state, microbatches = pipelined()
    name = next(name for name in state if name.endswith("weight") and state[name].dim() == 2)
    step = pipeline.start({**state, name: state[name][:, 1:]}, microbatches)
    with pytest.raises(RuntimeError) as caught:
        step.run()
    assert any("models.py" in note for note in caught.value.__notes__)


def test_another_number_of_microbatches():
    pipeline, state, microbatches = pipelined()
    with pytest.raises(ValueError, match="gets 2 microbatches, the schedule is for 3"):
        pipeline.start(state, microbatches[:2])


def test_parts_of_a_step():
    """Each part runs once, in order, and results wait for it."""
    pipeline, state, microbatches = pipelined("gpipe")
    step = pipeline.start(state, microbatches)
    with pytest.raises(RuntimeError, match="has not run"):
        step.result()
    with pytest.raises(RuntimeError, match="before its forward"):
        step.run(forward=False)
    step.run(backward=False)
    with pytest.raises(RuntimeError, match="the forward of this step has run already"):
        step.run()
    step.run(forward=False)
    assert_same(pipeline(state, microbatches), step.result())
    with pytest.raises(RuntimeError, match="has run already"):
        step.run(forward=False)
