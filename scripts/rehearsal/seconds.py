"""Seconds of a microbatch by arithmetic, row by row: what a rehearsal counted over a GPU's rates.

    ./scripts/rehearse.sh --counts after.json --only 30B-A3B_64gpu
    python -m scripts.rehearsal.seconds docs/results/counts_before.json after.json

Nothing is measured. Every row is a number of FLOPs, bytes or calls, divided by a rate: a peak of
the data sheet times the share of it that kernels are assumed to reach. Both are printed, with the
sources. A step's work is divided by its microbatches, so that the update has its share too.

The rows add up: of one stream, what its kernels take one after the other; of collectives, what is
not hidden. A collective is hidden by what the program launches between its start and its wait;
FSDP's, which are prefetched, by all that the device computes in the same direction.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.measure import print_table
from scripts.rehearsal.kinds import ATTENTION, FLOAT8, FLOAT32, GROUPED, HOST, MATMUL, ROWS


@dataclass(frozen=True)
class Device:
    """Peaks of a data sheet, each second."""

    name: str
    flops: float
    """Of dense bfloat16 products; of float8 ones twice as many."""
    float32_flops: float
    """Of products in float32, which are outside of tensor cores."""
    memory: float
    """Bytes that are read or written."""
    nvlink: float
    """Bytes that leave a GPU for others of its node."""
    infiniband: float
    """Bytes that leave a GPU for other nodes."""


H100 = Device("H100 SXM", 989e12, 67e12, 3.35e12, 450e9, 50e9)
"""NVIDIA's H100 data sheet; a 400 Gb/s adapter for each GPU, as in a DGX H100."""


class Assumption(NamedTuple):
    """A number that only hardware can tell."""

    value: float
    why: str


ASSUMED = {
    MATMUL: Assumption(0.70, "of the peak; scripts/bench/gpu_slice.py will tell"),
    GROUPED: Assumption(0.60, "of the peak; scripts/bench/gpu_moe.py will tell"),
    FLOAT32: Assumption(0.70, "of the peak"),
    FLOAT8: Assumption(0.60, "of the peak"),
    "flex forward": Assumption(0.38, "of the peak: Triton, arXiv 2407.08608, figure 5"),
    "flex backward": Assumption(0.29, "of the peak: assumed a little below FlashAttention-2"),
    "flash forward": Assumption(0.36, "of the peak: FlashAttention-2, likewise"),
    "flash backward": Assumption(0.32, "of the peak: FlashAttention-2, likewise, figure 6"),
    "cudnn forward": Assumption(0.60, "of the peak: cuDNN, likewise"),
    "cudnn backward": Assumption(0.50, "of the peak: cuDNN, likewise"),
    "memory": Assumption(0.90, "of the peak, by kernels that stream"),
    ROWS: Assumption(0.72, "of the peak, by kernels that pick rows: 80 % of what a copy reaches"),
    "links": Assumption(0.80, "of NVLink and InfiniBand, by NCCL's large messages"),
    "dispatch": Assumption(5e-6, "of the host for each operation of torch, views among them"),
    "wait": Assumption(20e-6, "until a device that the host waited for has work again"),
}
"""Shares of a peak, and seconds of the host."""

_MATMULS = (MATMUL, GROUPED, FLOAT32, FLOAT8)
_UPDATES = ("grad_norm", "optimizer")
_EXCHANGES = ("ep", "etp")


class Row(NamedTuple):
    """A line of the table."""

    name: str
    seconds: float
    says: str
    """The arithmetic."""


Part = Mapping[str, Any]


class Microbatch:
    """What was counted of a configuration's step, for one of its microbatches, on a device."""

    def __init__(self, found: Mapping[str, Any], device: Device = H100) -> None:
        self._found, self._device = found, device
        self._number = found["num_microbatches"]
        parts: list[Part] = found["step"]["parts"]
        self._links: list[Part] = found["step"]["links"]
        self._host = [part for part in parts if part["kind"] == HOST]
        self._device_parts = [part for part in parts if part["kind"] != HOST]

    def rows(self) -> list[Row]:
        """All rows; their sum is the microbatch's time."""
        return [
            self._ideal(),
            self._products(),
            self._attention(),
            self._sum("elementwise operations", "elementwise"),
            self._sum("rows that are picked and added", ROWS),
            self._sum("loss beside its products", "loss"),
            self._sum("recomputation", "recompute"),
            self._exchanges(),
            self._fsdp(),
            self._others(),
            self._sum("sums of gradients' squares and the update", "update"),
            self._launches(),
        ]

    # --- of the device ---

    def _ideal(self) -> Row:
        flops = sum(self._found["model_flops"].values())
        peak = self._device.flops
        return Row("the model's FLOPs at the peak", flops / peak, _tera(flops))

    def _products(self) -> Row:
        chosen = self._of("product")
        ideal = self._found["model_flops"]["products"] / self._device.flops
        says = [f"{_tera(self._total(chosen, 'flops', kind))} {kind}" for kind in _MATMULS]
        shown = ", ".join(each for each in says if not each.startswith("0.0 "))
        return Row("products slower than that", self._seconds(chosen) - ideal, shown)

    def _attention(self) -> Row:
        chosen = self._of(ATTENTION)
        ideal = self._found["model_flops"]["attention"] / self._device.flops
        names = sorted({_attention_name(part) for part in chosen})
        says = f"{_tera(self._total(chosen, 'flops'))} by {', '.join(names)}"
        return Row("attention slower than that", self._seconds(chosen) - ideal, says)

    def _sum(self, name: str, row: str) -> Row:
        chosen = self._of(row)
        flops, moved = self._total(chosen, "flops"), self._total(chosen, "bytes")
        says = f"{moved / 1e9:,.0f} GB in {self._total(chosen, 'kernels'):,.0f} kernels"
        if flops:
            says = f"{_tera(flops)}; {says}"
        return Row(name, self._seconds(chosen), says)

    def _of(self, row: str) -> list[Part]:
        return [part for part in self._device_parts if _row_of(part) == row]

    def _total(self, parts: Sequence[Part], what: str, kind: str | None = None) -> float:
        chosen = (part for part in parts if kind is None or part["kind"] == kind)
        return sum(part.get(what, 0.0) for part in chosen) / self._number

    def _seconds(self, parts: Sequence[Part]) -> float:
        return sum(self._seconds_of(part) for part in parts) / self._number

    def _seconds_of(self, part: Part) -> float:
        kind = part["kind"]
        if kind in _MATMULS:
            return part["flops"] / self._product_rate(kind)
        if kind == ATTENTION:
            return part["flops"] / (self._device.flops * ASSUMED[_attention_name(part)].value)
        return part.get("bytes", 0.0) / self._memory_rate(kind)

    def _product_rate(self, kind: str) -> float:
        peak = {FLOAT32: self._device.float32_flops, FLOAT8: 2 * self._device.flops}
        return peak.get(kind, self._device.flops) * ASSUMED[kind].value

    def _memory_rate(self, kind: str) -> float:
        return self._device.memory * ASSUMED[ROWS if kind == ROWS else "memory"].value

    # --- of collectives ---

    def _exchanges(self) -> Row:
        chosen = [link for link in self._links if _is_exchange(link)]
        seconds = sum(max(0.0, self._on_link(link) - self._covered(link)) for link in chosen)
        crossings = self._total([x for x in chosen if x["op"] == "all_to_all"], "kernels")
        says = f"{self._total(chosen, 'bytes') / 1e9:,.0f} GB in {crossings:,.0f} all-to-alls"
        hidden = sum(min(self._on_link(link), self._covered(link)) for link in chosen)
        says += f", {hidden / self._number:.3f} s of it hidden"
        return Row("exchanges of rows that are not hidden", seconds / self._number, says)

    def _fsdp(self) -> Row:
        """Gathers and reductions of parameters, as far as a direction computes less long; and
        copies into and out of their buffers."""
        copies = self._of("fsdp")
        exposed = 0.0
        for phases in (("forward",), ("recompute", "backward")):
            computed = [p for p in self._device_parts if p["phase"] in phases]
            links = [x for x in self._links if x["region"] == "fsdp" and _direction(x) in phases]
            sent = sum(map(self._on_link, links)) / self._number
            exposed += max(0.0, sent - self._seconds(computed))
        links = [link for link in self._links if link["region"] == "fsdp"]
        sent = sum(map(self._on_link, links)) / self._number
        says = (
            f"{self._total(copies, 'bytes') / 1e9:,.0f} GB copied; "
            f"{self._total(links, 'bytes') / 1e9:,.0f} GB sent in {sent:.3f} s, of which "
            f"{exposed:.3f} s are not hidden"
        )
        return Row("FSDP's copies, gathers and reductions", self._seconds(copies) + exposed, says)

    def _others(self) -> Row:
        chosen = [x for x in self._links if x["region"] != "fsdp" and not _is_exchange(x)]
        seconds = sum(max(0.0, self._on_link(link) - self._covered(link)) for link in chosen)
        says = f"{self._total(chosen, 'bytes') / 1e9:,.1f} GB"
        return Row("other collectives", seconds / self._number, says)

    def _on_link(self, link: Part) -> float:
        """Seconds of all its calls. NCCL's rings leave a node once, over all adapters of the
        group's GPUs there; an all-to-all sends each GPU's rows over its own."""
        share, sent = ASSUMED["links"].value, link.get("bytes", 0.0)
        inside, outside = self._device.nvlink * share, self._device.infiniband * share
        ranks, nodes = link["ranks"], link["nodes"]
        if nodes == 1:
            return sent / inside
        per_node = ranks / nodes
        if link["op"] in ("all_to_all", "send"):
            leaves = sent * (ranks - per_node) / (ranks - 1)
            return max(leaves / outside, (sent - leaves) / inside)
        return sent / min(inside, per_node * outside)

    def _covered(self, link: Part) -> float:
        """Seconds of what the device computes between its starts and its waits."""
        seconds = 0.0
        for kind, amount in link.get("covered", {}).items():
            if kind in _MATMULS:
                seconds += amount / self._product_rate(kind)
            elif kind == ATTENTION:
                seconds += amount / (self._device.flops * ASSUMED["flash forward"].value)
            else:
                seconds += amount / self._memory_rate(kind)
        return seconds

    # --- of the host ---

    def _launches(self) -> Row:
        """What the host takes longer than the device, and the device's start after each wait."""
        dispatches = self._total(self._host, "dispatches")
        waits = self._found["waits"] / self._number
        host = dispatches * ASSUMED["dispatch"].value
        longer = max(0.0, host - self._seconds(self._device_parts))
        says = f"{dispatches:,.0f} dispatches take {host:.3f} s; {waits:.0f} waits"
        return Row("host", longer + waits * ASSUMED["wait"].value, says)


def _row_of(part: Part) -> str:
    """The one row that a part counts in."""
    kind, region = part["kind"], part["region"]
    if region == "fsdp":
        return "fsdp"
    if region in _UPDATES:
        return "update"
    if part["phase"] == "recompute":
        return "recompute"
    if kind in _MATMULS:
        return "product"
    if kind == ATTENTION:
        return ATTENTION
    if region == "loss":
        return "loss"
    return ROWS if kind == ROWS else "elementwise"


def _attention_name(part: Part) -> str:
    name = part["name"]
    library = "flex" if name.startswith("flex") else "cudnn" if "cudnn" in name else "flash"
    return f"{library} {'backward' if part['phase'] == 'backward' else 'forward'}"


def _is_exchange(link: Part) -> bool:
    return link["axis"] in _EXCHANGES and link["region"] != "fsdp"


def _direction(link: Part) -> str:
    """FSDP's last reductions are called when no node of the backward runs any more."""
    return "forward" if link["op"] == "all_gather" and link["phase"] == "forward" else "backward"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP"


# --- tables ---


def compared(columns: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The heads and the lines of a table with a column of seconds for each of `columns`."""
    made = {name: Microbatch(found).rows() for name, found in columns.items()}
    lines = [
        [rows[0].name, *(f"{row.seconds:.3f}" for row in rows)]
        for rows in zip(*made.values(), strict=True)
    ]
    totals = {name: total(rows) for name, rows in made.items()}
    lines.append(["sum", *(f"{seconds:.3f}" for seconds in totals.values())])
    shares = (rows[0].seconds / totals[name] for name, rows in made.items())
    lines.append(["model FLOPs of the peak", *(f"{share:.0%}" for share in shares)])
    return ["seconds of a microbatch", *made], lines


def total(rows: Sequence[Row]) -> float:
    return sum(row.seconds for row in rows)


def read(path: Path, word: str) -> dict[str, Any]:
    """The one configuration of a file whose name has `word`; ends the script otherwise."""
    found = {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if word in k}
    if len(found) != 1:
        names = ", ".join(found) or "none"
        sys.exit(f"{path}: --config {word!r} is to name one configuration, and names {names}")
    return next(iter(found.values()))  # type: ignore[no-any-return]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.rehearsal.seconds", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("counts", nargs="+", type=Path, help="of rehearse.sh --counts")
    parser.add_argument("--config", default="30B-A3B_64gpu", help="part of a name; %(default)s")
    arguments = parser.parse_args(argv)
    columns = {path.stem: read(path, arguments.config) for path in arguments.counts}
    for name, found in columns.items():
        tokens, number = found["tokens"], found["num_microbatches"]
        print(f"{name}: {tokens:,} tokens a microbatch, {number} microbatches a step")
    print_table(*compared(columns))
    for name, found in columns.items():
        rows = Microbatch(found).rows()
        print_table([name, "s", ""], [[row.name, f"{row.seconds:.3f}", row.says] for row in rows])
    print(f"\n{H100}")
    for name, each in ASSUMED.items():
        print(f"assumed, {name}: {each.value:g} {each.why}")


if __name__ == "__main__":
    main(sys.argv[1:])
