"""Options: whatever they are given, they are what was asked or refused."""

import attrs
from damage import OTHERS
from hypothesis import given, settings
from hypothesis import strategies as st

from pfeife.backend.settings.options import Options, options_from

ASKED = st.sampled_from(
    [*OTHERS, float("nan"), -1.0, "outside", "cpu", ("cpu",), ["cpu"], {1: "mean"}, {1: []}, 3, "/"]
)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in attrs.fields(Options)] + ["colour", 3]),
        ASKED,
        max_size=3,
    )
)
def test_any_options(given):
    try:
        options = options_from(given)
    except ValueError as error:
        assert "option" in str(error)
        return
    assert options.microbatches % options.replicas == 0 and type(options.search_seconds) is not str
