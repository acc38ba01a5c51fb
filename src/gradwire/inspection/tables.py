"""The reports as rich tables, several narrow ones, so that they fit a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from gradwire.inspection.frame_report import FrameReport
from gradwire.inspection.structure import Structure
from gradwire.inspection.tensors import TensorReport

FAMILIES = {"normal": "Normal", "laplace": "Laplace", "gennorm": "GenNorm"}
MODELS = FAMILIES | {"gennorm+zeros": "GN+zeros", "histogram": "histogram"}
SECTIONS = ("header", "side", "model", "lane", "symbol")
NOTHING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with so many digits after the point, or a dash for None."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def shape(dimensions: Sequence[int]) -> str:
    """Write a shape such as 64×32."""
    return "×".join(map(str, dimensions)) or "scalar"


def _table(title: str, columns: Iterable[str], left: int = 1) -> Table:
    """The first `left` columns are text, all others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table


# ── frames ────────────────────────────────────────────────────────────────────────────────────────


def frame_tables(reports: list[FrameReport], total: int) -> list[Table]:
    """One frame as a list of its fields; several, or the first of `total`, as one line each."""
    if total == 1:
        return [_one_frame(reports[0])]
    what = _table("Frames", ("#", "codec", "format", "dtype", "shape", "flags", "coder", "model", "step"), 8)
    layout = _table("Coding", ("#", "precision", "lanes", "chunks", "β", "zero mass", "checksum"))
    size = _table("Bytes", ("#", *SECTIONS, "frame", "bits/entry", "ratio"))
    for i, r in enumerate(reports, 1):
        what.add_row(
            str(i), r.codec, r.format or NOTHING, r.dtype, shape(r.shape), ", ".join(r.flags) or NOTHING,
            r.coder or NOTHING, r.model or NOTHING, _steps(r),
        )  # fmt: skip
        fields = [NOTHING if f is None else str(f) for f in (r.precision, r.lanes, r.chunks)]
        layout.add_row(str(i), *fields, number(r.beta), number(r.zero_mass), "ok")
        counts = [f"{count:,}" for count in (*_sections(r), r.frame_bytes)]
        size.add_row(str(i), *counts, number(r.bits_per_entry), f"×{r.ratio:.2f}")
    size.add_section()
    size.add_row("all", *_sums(reports))
    return [what, layout, size]


def _sums(reports: list[FrameReport]) -> list[str]:
    sections = [sum(column) for column in zip(*map(_sections, reports), strict=True)]
    entries, dense = sum(r.elements for r in reports), sum(r.dense_bytes for r in reports)
    total = sum(sections)
    counts = [f"{count:,}" for count in (*sections, total)]
    return [*counts, number(8 * total / entries if entries else None), f"×{dense / total:.2f}"]


def _one_frame(r: FrameReport) -> Table:
    table = _table("Frame", ("field", "value"), 2)
    fields = {
        "version": r.version, "codec": r.codec, "format": r.format, "dtype": r.dtype,
        "shape": shape(r.shape), "flags": ", ".join(r.flags) or "none", "step": _steps(r),
        "coder": r.coder, "model": r.model, "precision": r.precision and f"{r.precision} bits",
        "β": r.beta and number(r.beta), "zero mass": None if r.zero_mass is None else number(r.zero_mass),
        "histogram": _frequencies(r), "lanes": r.lanes, "chunks": r.chunks, **r.details,
    }  # fmt: skip
    sections = zip(SECTIONS, _sections(r), strict=True)
    fields |= {f"{name} bytes": f"{count:,}" for name, count in sections if count}
    fields |= {
        "frame bytes": f"{r.frame_bytes:,}", "bits per entry": number(r.bits_per_entry),
        "ratio to dense": f"×{r.ratio:.2f}", "checksum": "ok",
    }  # fmt: skip
    for name, value in fields.items():
        if value not in (None, NOTHING):
            table.add_row(name, str(value))
    return table


def _sections(r: FrameReport) -> tuple[int, ...]:
    return r.header_bytes, r.side_bytes, r.model_bytes, r.lane_bytes, r.symbol_bytes


def _steps(r: FrameReport) -> str:
    if not r.steps:
        return NOTHING
    low, high = min(r.steps), max(r.steps)
    return f"{low:.4g}" if len(r.steps) == 1 else f"{len(r.steps)} steps, {low:.3g} to {high:.3g}"


def _frequencies(r: FrameReport) -> str | None:
    if r.model != "histogram" or r.frequencies is None:
        return None
    if len(r.frequencies) > 16:
        return f"{len(r.frequencies)} symbols"
    return f"{' '.join(map(str, r.frequencies))}, of {sum(r.frequencies)}"


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────


def tensor_tables(reports: list[TensorReport], fmt: str) -> list[Table]:
    """Return the tables about tensors; `fmt` is the format whose code lengths are compared."""
    usable = [r for r in reports if r.bits]
    tables = [_fits(reports)]
    if any(r.w2 for r in reports):
        tables.append(_distances([r for r in reports if r.w2]))
    for coder, title in (("huffman", "Huffman"), ("ideal", "an ideal coder, which rANS comes close to")):
        if usable:
            tables.append(_code_lengths(usable, coder, f"Bits per entry in {fmt}, coded by {title}"))
    sized = [r for r in reports if r.sizes]
    tables += [_sizes(sized), _totals(sized)] if sized else []
    structured = [(r.name, r.structure) for r in reports if r.structure is not None]
    return [*tables, _structures(structured), _rates(structured)] if structured else tables


def _fits(reports: list[TensorReport]) -> Table:
    columns = ["tensor", "shape", "dtype", "zeros", "mean/σ", "β", "α"]
    notes = ["note"] if any(r.note for r in reports) else []
    table = _table("Fit by moments, exact zeros left out", columns + notes, 3)
    for r in reports:
        zeros = NOTHING if r.zeros is None else f"{r.zeros:.1%}"
        alpha = NOTHING if r.alpha is None else f"{r.alpha:.3g}"
        row = [escape(r.name), shape(r.shape), r.dtype, zeros, number(r.mean), number(r.beta), alpha]
        table.add_row(*row, *([r.note] if notes else []))
    return table


def _distances(reports: list[TensorReport]) -> Table:
    columns = [f"{measure}\n{family}" for measure in ("W2", "K–S") for family in FAMILIES.values()]
    table = _table("Distance of the standardised entries to each model", ("tensor", *columns))
    for r in reports:
        w2, ks = ([measure[family] for family in FAMILIES] for measure in (r.w2, r.ks))
        table.add_row(escape(r.name), *_best_bold(w2), *_best_bold(ks))
    return table


def _code_lengths(reports: list[TensorReport], coder: str, title: str) -> Table:
    table = _table(title, ("tensor", "entropy", *MODELS.values()))
    for r in reports:
        table.add_row(escape(r.name), number(r.entropy), *_best_bold([r.bits[m][coder] for m in MODELS]))
    return table


def _best_bold(values: list[float]) -> list[str]:
    best = number(min(values))
    return [f"[bold green]{text}[/]" if text == best else text for text in map(number, values)]


def _sizes(reports: list[TensorReport]) -> Table:
    formats = list(reports[0].sizes)
    table = _table("Bytes of the frame", ("tensor", "dense", *formats))
    for r in reports:
        sizes = [f"{'≈' if s.estimated else ''}{s.bytes:,}" for s in r.sizes.values()]
        table.add_row(escape(r.name), f"{r.dense_bytes:,}", *sizes)
    return table


def _totals(reports: list[TensorReport]) -> Table:
    entries, dense = sum(r.entries for r in reports), sum(r.dense_bytes for r in reports)
    table = _table("All of them", ("format", "bytes", "bits/entry", "ratio", "worst NMSE"))
    table.add_row("dense", f"{dense:,}", number(8 * dense / entries), "×1.00", "0")
    for fmt in reports[0].sizes:
        total = sum(r.sizes[fmt].bytes for r in reports)
        worst = max(r.sizes[fmt].nmse for r in reports)
        table.add_row(fmt, f"{total:,}", number(8 * total / entries), f"×{dense / total:.2f}", f"{worst:.4f}")
    return table


def _structures(named: list[tuple[str, Structure]]) -> Table:
    columns = ("tensor", "view", "DCT", "rank", "factors", "classes", "scales")
    table = _table("Structure, and the bits per entry that it saves or takes", columns, 2)
    for name, s in named:
        sides = number(s.factor_bits), str(s.classes), number(s.class_bits)
        table.add_row(escape(name), s.view, number(s.gain, 2), str(s.rank), *sides)
    return table


def _rates(named: list[tuple[str, Structure]]) -> Table:
    columns = ("tensor", "NMSE", *named[0][1].bits, "saves")
    table = _table("Bits per entry of three recipes at the same error", columns)
    for name, s in named:
        saves = f"{'≈' if s.estimated else ''}×{s.saves:.2f}"
        table.add_row(escape(name), number(s.nmse), *_best_bold(list(s.bits.values())), saves)
    return table
