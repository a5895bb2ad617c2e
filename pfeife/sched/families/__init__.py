"""Schedules by a formula, each with its paper: `policies` first, then `zero_bubble`."""
