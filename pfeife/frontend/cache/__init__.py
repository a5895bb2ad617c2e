"""Captured programs on disk, as data.

`capture_cache` keeps them, by what they are made of (`capture_key`); read it first. `stored` is a
program as JSON, `spelling` a value of one.
"""
