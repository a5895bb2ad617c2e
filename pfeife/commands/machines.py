"""`pfeife machines`: the profiles that ship with the package."""

import argparse

HELP = "list the machines and kinds of links with shipped figures"
EXAMPLES = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(given: argparse.Namespace) -> str:
    from pfeife import report
    from pfeife.cost import machine, machines
    from pfeife.data.link import link_kind, link_kinds

    rows = []
    for name in machines():
        one = machine(name)
        rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in one.flops.items())
        rows.append((name, report.size(one.memory), f"{one.memory_bandwidth / 1e9:g}", rates))
    shown = report.table(rows, ("machine", "memory", "GB/s", "sustained TFLOP/s"))
    return f"{shown}\n\n{report.links_table(map(link_kind, link_kinds()))}"
