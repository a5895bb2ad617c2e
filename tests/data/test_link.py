"""Shipped kinds of links: their figures say where they come from."""

import attrs
import pytest

from pfeife.data.link import LinkKind, link_kind, link_kinds


@pytest.mark.parametrize("name", link_kinds())
def test_a_shipped_kind(name):
    kind = link_kind(name)
    assert kind.name == name and 1e9 < kind.bandwidth < 1e12 and 1e-6 < kind.latency < 1e-4
    assert set(kind.sources) == {"bandwidth", "latency", "overlap"}
    for field in ("bandwidth", "latency"):
        assert "https://" in kind.sources[field]
    assert kind.transfer_seconds(10**9) == kind.latency + 1e9 / kind.bandwidth
    assert attrs.evolve(kind, latency=0.0, overlap=0.75).send_seconds(10**9) == pytest.approx(
        0.25e9 / kind.bandwidth
    )


def test_each_generation_is_faster():
    for names in (
        *(("nvlink3", "nvlink4", "nvlink5"), ("pcie3", "pcie4", "pcie5")),
        *(("ib-hdr", "ib-ndr", "ib-xdr"), ("roce-100", "roce-200", "roce-400")),
        ("ethernet-10", "ethernet-25", "ethernet-100"),
    ):
        rates = [link_kind(name).bandwidth for name in names]
        assert rates == sorted(rates)


def test_what_is_no_kind():
    with pytest.raises(ValueError, match=r"link 'nvlink-4' is none of \[.*nearest is 'nvlink4'"):
        link_kind("nvlink-4")
    with pytest.raises(ValueError, match=r"LinkKind\.sources: \['speed'\] are no figures"):
        LinkKind("mine", 1e9, sources={"speed": "measured"})
    with pytest.raises(ValueError, match=r"LinkKind\.bandwidth must be positive"):
        LinkKind("mine", 0.0)
