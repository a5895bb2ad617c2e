"""`pfeife machines`: the profiles that ship with the package."""

import argparse

HELP = "list the machines and kinds of links with shipped figures"
EXAMPLES = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options."""
    pass


def run(options: argparse.Namespace) -> str:
    """A table of the machines, and one of the kinds of links."""
    from pfeife import report
    from pfeife.cost import machine, machines
    from pfeife.data.link import link_kind, link_kinds

    rows = []
    for name in machines():
        profile = machine(name)
        rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in profile.flops.items())
        rows.append(
            (name, report.size(profile.memory), f"{profile.memory_bandwidth / 1e9:g}", rates)
        )
    shown = report.table(rows, ("machine", "memory", "GB/s", "sustained TFLOP/s"))
    return f"{shown}\n\n{report.links_table(map(link_kind, link_kinds()))}"
