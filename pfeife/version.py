"""Which Pfeife this is. It is known without being installed, too."""

VERSION = "0.1.0"
