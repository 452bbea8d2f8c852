"""Reports of results: Markdown tables that are readable on a terminal, with what was measured and how to read them."""

from collections.abc import Mapping, Sequence

from tower_train.bench.results import Figure, Result

_IDLE_SHARE = 0.02  # of one core, from which a side that should stand still gets a warning


def opening(machine: Mapping, common: Mapping, what: str) -> list[str]:
    """Returns the lines above the tables; `what` was measured, such as '128 examples a step, 5 rounds of 5 s'."""
    lines = [
        f"machine:  {machine['processor']}, {machine['cores']} cores, {', '.join(common['gpus']) or 'no GPU'}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        f"versions: {', '.join(f'{package} {version}' for package, version in machine['versions'].items())}",
        f"data:     {common['data']}",
        f"each:     {what}",
    ]
    return lines + ([f"*** {common['notice']}"] if common["notice"] else [])


def table(title: str, rows: Sequence[Result]) -> list[str]:
    """Tabulates the sides of a part; see Result."""
    head = [title, "examples/sec", "range", "ratio", "range", "of the ceiling", "peak memory", "first step"]
    on_gpus = any(row.card_bytes for row in rows)
    body = []
    for row in rows:
        cells = [row.side.title, *_median_and_range(row.rate, ".0f"), *_median_and_range(row.ratio, ".2f")]
        cells.append(f"{row.share.median:.2f}" if row.share else "-")
        cells += (
            ["-", "-"] if row.side.is_ceiling else [f"{row.peak_bytes / 2**20:.0f} MiB", f"{row.first_step_secs:.1f} s"]
        )
        body.append(cells + ([f"{row.card_bytes / 2**20:.0f} MiB"] if on_gpus else []))
    return markdown(head + (["of a GPU's memory"] if on_gpus else []), body)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table whose first column is left-aligned and whose others are right-aligned."""
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]

    def line(cells):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return " | ".join([f"| {cells[0]:<{widths[0]}}", *aligned[1:]]) + " |"

    return [line(head), line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]), *map(line, body)]


def notes(rows: Sequence[Result], flops_per_example: float | None) -> list[str]:
    """Returns the lines below the tables: how to read them, and warnings about disturbed measurements."""
    lines = [
        "examples/sec: median over rounds; ratio: to the first line, median of each round's; range: of these; "
        "first step: from the start of the process."
    ]
    if any(row.share for row in rows):
        lines.append(
            f"The network's convolutions and matrix products: {flops_per_example / 1e6:.1f} MFLOP a training example; "
            "a ceiling's examples/sec are what its rate is enough for. A side beyond its ceiling computes convolutions "
            "with fewer products than are counted."
        )
        lines += [
            f"{row.side.title}: {row.rate.median * flops_per_example / 1e9:.0f} GFLOP/s."
            for row in rows
            if row.side.is_ceiling
        ]
    for row in rows:
        idle, idle_cpu = row.idle_secs, row.idle_cpu_secs
        if idle_cpu > _IDLE_SHARE * idle:
            lines.append(f"Warning: {row.side.title} used {idle_cpu / idle:.0%} of a core while others were measured.")
    return lines


def _median_and_range(figure: Figure, form: str) -> list[str]:
    return [f"{figure.median:{form}}", f"{figure.low:{form}} to {figure.high:{form}}"]
