"""Captured programs on disk, as data.

`capture_cache` keeps them, by what they are made of (`capture_key`); read it first. `program_json`
is a program as JSON, `graph_json` a value of one.
"""
