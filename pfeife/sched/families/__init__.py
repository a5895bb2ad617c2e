"""Schedules by a formula, each with its paper: `policies` first, then `zero_bubble`; `family` has
what a family is, for one of your own."""
