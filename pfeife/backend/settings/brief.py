"""Classes whose `help()` fits on a screen."""


class Brief(type):
    """A class of this kind lists what is public: `help()` leaves out what every object has."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]
