"""Decisions as plain data, which go to JSON and back: nothing here computes with programs.

`machine` is what there is to run on, `network` what joins its ranks and `link` the figures of that,
`replicas` how often, `schedule` what every rank does, `plan` where to cut, and `timeline` what that
takes. Read these first; `plain` reads and writes them as JSON, `values` other values of Python,
`checks` has their validators, `optimizers` the bytes that an optimizer keeps, `figures` what a step
has taken, `forecast` what one is expected to take and `advice` what to do about it, `tried` what a
search has looked at; `units` writes numbers for people; `files`, `progress`, `processes`
and `garbage` are what all others need to touch the world.
"""
