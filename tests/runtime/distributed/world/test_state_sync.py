"""What ranks tell one another of state."""

from pfeife.data import plain
from pfeife.runtime.distributed.world.state_sync import News


def test_news_are_read_as_they_were_told():
    news = News(
        stepped="0123456789abcdef",
        settings=((0, "0123456789abcdef"), (7, "")),
        lost=("a name\nof two lines",),
        wrote=((-4099, 2),),
        shared=(((0, 2), "fedc"),),
        behind=True,
    )
    assert plain.from_json(News, news.text) == news
    assert news.is_of_tensors


def test_what_is_told_at_every_call_travels_with_the_agreement():
    """In fewer bytes than `World.agreed` takes without a message of its own."""
    digest = "0123456789abcdef"
    usual = News(stepped=digest, settings=((0, digest), (1, digest)), steps=1)
    assert len(usual.text) < 128 and not usual.is_of_tensors
    assert not News().text
