"""A module whose names steer steps, see `edges.steering`."""

import sys as sys

FACTOR = 1.0


def factor():
    return FACTOR


def imported_inside():
    from steered import FACTOR

    return FACTOR


def replaced():
    return 1.0
