"""The text of docs/roofline.md. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from replicas.generators.simulated.calibration import CONTEXT
from replicas.generators.ttnn.profiles import PRODUCTS, PROFILES
from replicas.generators.ttnn.programs import ChipCores, bank_readers
from replicas.tt.meshes import mesh_spec
from scripts.roofline.chunk import chunk_ops
from scripts.roofline.decode import decode_ops
from scripts.roofline.estimate import SLOWER, STATED, limit_s, timed, total_s
from scripts.roofline.facts import (
    ASSUMPTIONS,
    CORES,
    LEAST_SHARE,
    MESHES,
    MODELS,
    SOURCES,
    published,
)
from scripts.roofline.ops import (
    ALL_PRODUCTS,
    UPSTREAM,
    UPSTREAM_PRECISION,
    native_design,
    native_precision,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replicas.generators.ttnn.profiles import Fidelity
    from scripts.roofline.estimate import Timed
    from scripts.roofline.facts import Cores, Key, Topology
    from scripts.roofline.ops import Design, Op, Precision, Product, Program

CHUNKS = (128, 1024, 8192)
"""Buckets of chunks on the page."""

_PARTS = (
    *PRODUCTS, "attention", "norms", "rest of a layer", "sums over chips", "output",
    "embedding, rotary rows", "drawing",
)  # fmt: skip


_WORKING = (*PRODUCTS, "attention", "rest of a layer", "output")
"""Those of the parts that read DRAM or compute."""
_PROFILE = "performance"
"""The profile that most of the page is about."""
_FIDELITIES: tuple[Fidelity, ...] = ("LoFi", "HiFi2", "HiFi4")
_MICRO = "\u00b5s"
_UPSTREAM = "*upstream's*"
_TOPOLOGIES: tuple[Topology, ...] = ("line", "ring")
_ONCE: dict[Product, Program] = dict.fromkeys(ALL_PRODUCTS, "columns")
"""Programs that read every weight exactly once."""


Kind: TypeAlias = "tuple[Precision, Design]"
"""Dtypes and programs of a model on a mesh."""


def native(profile: str, model: str, mesh: str) -> Kind:
    """Return the dtypes and programs of a profile of the native models."""
    spec, chosen = mesh_spec(mesh), PROFILES[profile]
    chip = ChipCores(CORES[spec.arch].grid, spec.chip.dram_banks)
    return native_precision(chosen), native_design(MODELS[model], chosen, chip, spec.num_chips)


def upstream(_model: str, mesh: str) -> Kind:
    """Return upstream's performance settings; two cores beside each of a p150's banks."""
    readers = bank_readers(mesh_spec(mesh).chip.dram_banks)
    return UPSTREAM_PRECISION, replace(UPSTREAM, readers=readers)


KINDS: dict[str, Callable[[str, str], Kind]] = {
    **{name: partial(native, name) for name in PROFILES},
    _UPSTREAM: upstream,
}
"""The variants that the page shows of each model and mesh, by name."""


def decode(model: str, mesh: str, kind: Kind) -> list[Op]:
    """Return the ops of a decode step of the page."""
    spec, (precision, design) = mesh_spec(mesh), kind
    return decode_ops(
        MODELS[model], spec.num_chips, precision, design,
        num_banks=spec.chip.dram_banks, context=CONTEXT,
    )  # fmt: skip


def decode_timed(
    model: str,
    mesh: str,
    kind: Kind,
    given: Mapping[Key, float] = STATED,
    topology: Topology = "line",
) -> list[Timed]:
    """Return the ops of `decode` with times; arguments as for `estimate.timed`."""
    return timed(decode(model, mesh, kind), mesh_spec(mesh), given, topology)


def decode_rate(
    model: str,
    mesh: str,
    name: str,
    given: Mapping[Key, float] = STATED,
    topology: Topology = "line",
) -> float:
    """Return the estimated tokens/s/user of a kind of `KINDS`; see `decode_timed`."""
    kind = KINDS[name](model, mesh)
    return 1 / total_s(decode_timed(model, mesh, kind, given, topology))


def decode_limit_s(model: str, mesh: str, precision: Precision) -> tuple[float, float]:
    """Return `estimate.limit_s` of a decode step that reads everything once."""
    once = replace(UPSTREAM, products=_ONCE)
    return limit_s(decode(model, mesh, (precision, once)), mesh_spec(mesh))


def text() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION, _chips(), _assumptions(), _decode(), _work(), _shares(), _ops(),
             _remains(), _beside(), _prefill(), _FOLLOWS, _sources()]  # fmt: skip
    return "\n".join(parts)


_INTRODUCTION = f"""\
# Roofline

The cost of a step of the native models ([Tenstorrent meshes](tenstorrent.md#the-native-models)) on
a chip, by arithmetic: bytes, products, and an estimate of the time of every op, beside the rates
that Tenstorrent has published. Use it to find the op to measure first on a board. **Nothing on this
page was measured by this project**: no speed of its own has been seen on silicon.

`python -m scripts.roofline_page` writes the page; `scripts/roofline/` has the facts, the ops and
the model of time. A decode step has 32 rows, each with {CONTEXT} tokens of context, and draws its
tokens on the device; a mesh is one lane. "Upstream's programs" are those of tt_transformers'
performance settings in the same model of time. The comparison with upstream's published rates shows
how far that model can be trusted.

The ratio to upstream's programs says more than any rate: the same model of time gives both, so
most of its errors cancel. Where sources publish two values of an assumption, a rate has a range:
with the stated values, and with the slower of each pair, all together.
"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _chips() -> str:
    rows = []
    for name in MESHES:
        spec = mesh_spec(name)
        cores = CORES[spec.arch]

        rows.append([
            name, str(spec.num_chips), f"{spec.chip.dram_bytes_per_s / 1e9:.0f}",
            str(spec.chip.dram_banks), str(cores.grid.num_cores),
            *(_tera(cores, cores.grid.num_cores, fidelity) for fidelity in _FIDELITIES),
            *(_tera(cores, spec.chip.dram_banks, fidelity) for fidelity in _FIDELITIES[:2]),
        ])  # fmt: skip
    header = ["mesh", "chips", "GB/s", "banks", "cores", "LoFi", "HiFi2", "HiFi4",
              "LoFi at the banks", "HiFi2 at the banks"]  # fmt: skip
    return f"""\
## Chips

For each chip: the peak of its DRAM, and TFLOP/s of its matrix engines by fidelity, for all cores
and for those beside the banks. Only the latter compute a product whose weights lie in stripes.
Sources: gemm, dram, dram-blackhole, `replicas/tt/meshes.py`.

{_table(header, rows)}"""


def _tera(cores: Cores, num_cores: int, fidelity: Fidelity) -> str:
    return f"{cores.flops_per_s(num_cores, fidelity) / 1e12:.0f}"


def _assumptions() -> str:
    rows = [
        [_value(stated.value), stated.text, stated.source,
         "" if stated.other is None else f"{_value(stated.other)} ({stated.other_source})"]
        for stated in ASSUMPTIONS.values()
    ]  # fmt: skip
    return f"""\
## Assumptions

None was fitted to a rate below.

- The time of an op is the longest of four: its bytes, its arithmetic, its kernel's own time and its
  way over links. Ops run one after another.
- Times of collectives are interpolated between measurements on Wormhole (collectives); those of a
  T3K are for a line, the usual fabric of its mesh here; [a ring](#t3k-as-a-ring) is faster.
- Times of kernels hold for 32 rows of any width. On Blackhole they are shorter by its faster clock.
- The host costs nothing: two steps are under way.
- For Blackhole no share of DRAM is published for a product, so Wormhole's are used. Plain readers
  on Blackhole reach 98 % beside the banks, and 67 % elsewhere (dram-blackhole).

{_table(["stated", "what", "source", "or"], rows)}"""


def _value(value: float) -> str:
    if value > LEAST_SHARE:
        return f"{100 * value:.0f} %"
    return f"{1e6 * value:.3g} {_MICRO}" if value > 1e-7 else f"{1e9 * value:.3g} ns"


def _rates(model: str, mesh: str, num_users: int) -> str:
    """Return the published, measured rates of as many users."""
    return ", ".join(
        f"{rate.tokens_per_s_per_user:g}" + (" (two readers)" if rate.kind != "measured" else "")
        for rate in published()
        if (rate.model, rate.mesh, rate.batch) == (model, mesh, num_users)
        and rate.kind.startswith("measured")
    )


def _decode() -> str:
    summary, rows = [], []
    for model in MODELS:
        for mesh in MESHES:
            slow, fast = (decode_rate(model, mesh, _PROFILE, given) for given in (SLOWER, STATED))
            their_slow, their_fast = (
                decode_rate(model, mesh, _UPSTREAM, given) for given in (SLOWER, STATED)
            )
            ratios = f"{100 * slow / their_slow:.0f} to {100 * fast / their_fast:.0f} %"
            summary.append([
                model, mesh, f"**{ratios}**",
                f"{slow:.1f} to {fast:.1f}", f"{their_slow:.1f} to {their_fast:.1f}",
                _rates(model, mesh, 32), _rates(model, mesh, 1),
            ])  # fmt: skip
            for name, make in KINDS.items():
                kind = make(model, mesh)
                found = decode_timed(model, mesh, kind)
                dram_s, math_s = decode_limit_s(model, mesh, kind[0])
                rows.append([
                    model, mesh, name,
                    f"{sum(t.op.count * t.op.num_bytes for t in found) / 1e9:.2f}",
                    f"{sum(t.op.count * t.op.flops for t in found) / 1e9:.0f}",
                    f"{1e3 * dram_s:.1f}", f"{1e3 * math_s:.1f}", f"{1e3 * total_s(found):.1f}",
                    f"{1 / max(dram_s, math_s):.1f}",
                    f"{decode_rate(model, mesh, name, SLOWER):.1f}", f"{1 / total_s(found):.1f}",
                ])  # fmt: skip
    heads = ["model", "mesh", f"`{_PROFILE}`, of upstream's programs", f"`{_PROFILE}`",
             "upstream's programs", "published, 32 users", "published, 1 user"]  # fmt: skip
    header = ["model", "mesh", "profile", "GB", "GFLOP", "DRAM ms", "arithmetic ms", "estimate ms",
              "limit", "with the slower values", "with the stated values"]  # fmt: skip
    return f"""\
## Decode

Estimates, from the slower values to the stated ones, beside measured rates, all in tokens/s/user.
The estimates are of 32 users. A step of one user reads the same weights and less of the cache, so
its rates stand apart. Of a p150 upstream has published rates with one core beside each bank, and
one with two ("two readers"), as in both columns of estimates. A T3K is a line here; upstream's
programs make [a ring](#t3k-as-a-ring) of it.

{_table(heads, summary)}
For one chip and step: the bytes read, arithmetic in whole tiles, the times of both at the chip's
peak if nothing is read twice, the estimate with the stated values, and tokens/s/user.

{_table(header, rows)}
{_ring()}"""


def _ring() -> str:
    rows = []
    for model in MODELS:
        for name in KINDS:
            rates = [
                decode_rate(model, "T3K", name, given, topology)
                for topology in _TOPOLOGIES
                for given in (SLOWER, STATED)
            ]
            rows.append([model, name, *(f"{rate:.1f}" for rate in rates)])
    ratios = [
        100 * decode_rate("Llama-3.1-8B", "T3K", _PROFILE, given)
        / decode_rate("Llama-3.1-8B", "T3K", _UPSTREAM, given, "ring")
        for given in (SLOWER, STATED)
    ]  # fmt: skip
    of_ring = f"{min(ratios):.0f} to {max(ratios):.0f} %"
    header = ["model", "profile", *(f"{topology}, {given} values" for topology in _TOPOLOGIES
                                    for given in ("slower", "stated"))]  # fmt: skip
    return f"""\
### T3K as a ring

Tokens/s/user, of 32 users. The native models use a ring if the mesh is opened with one
(`mesh: {{fabric: FABRIC_1D_RING}}`). tt_transformers asks for one on a T3K, so its published rates
compare with the ring's columns. `{_PROFILE}` of Llama-3.1-8B on a line has {of_ring} of upstream's
programs on a ring.

{_table(header, rows)}"""


def _work() -> str:
    rows = []
    for model in MODELS:
        for mesh in MESHES:
            kind = native(_PROFILE, model, mesh)
            steps = {"decode": decode(model, mesh, kind)}
            steps |= {f"{n} tokens": chunk(model, mesh, kind, n) for n in CHUNKS[1:2]}
            for name, ops in steps.items():
                rows.append([model, mesh, name, *(_work_of(ops, part) for part in _WORKING)])
    return f"""\
## Bytes and arithmetic by op

For one chip, all layers, with `{_PROFILE}`: MB between DRAM and the cores, and GFLOP, of a decode
step (32 tokens, one of each user) and of a chunk of a prompt.

{_table(["model", "mesh", "step", *_WORKING], rows)}"""


def _work_of(ops: Sequence[Op], part: str) -> str:
    num_bytes = sum(op.count * op.num_bytes for op in ops if op.part == part)
    flops = sum(op.count * op.flops for op in ops if op.part == part)
    return f"{num_bytes / 1e6:.0f}, {flops / 1e9:.1f}"


def _shares() -> str:
    rows = []
    for model in MODELS:
        for mesh in MESHES:
            for name, make in KINDS.items():
                found = decode_timed(model, mesh, make(model, mesh))
                whole = total_s(found)
                shares = [sum(t.total_s for t in found if t.op.part == part) for part in _PARTS]
                rows.append([model, mesh, name, *(f"{100 * s / whole:.0f}" for s in shares)])
    return f"""\
## Shares

Percent of the estimated decode step. "Rest of a layer" is cutting, rotating, caching and joining
heads, the MLP's SiLU, and sums of the residual.

{_table(["model", "mesh", "profile", *_PARTS], rows)}"""


def _ops() -> str:
    tables = []
    for name, make in KINDS.items():
        found = decode_timed("Llama-3.1-8B", "N150", make("Llama-3.1-8B", "N150"))
        whole = total_s(found)
        rows = [
            [
                t.op.part, " ".join(f"`{call}`" for call in t.op.calls), str(t.op.count),
                t.op.program or "", f"{t.op.num_bytes / 1e6:.1f}", f"{t.op.flops / 1e9:.2f}",
                f"{1e6 * t.total_s / t.op.count:.1f}", t.bound, f"{1e3 * t.total_s:.2f}",
                f"{100 * t.total_s / whole:.1f}",
            ]
            for t in sorted(found, key=lambda t: -t.total_s)
            if t.total_s > 0.001 * whole
        ]  # fmt: skip
        header = ["part", "op", "times", "program", "MB", "GFLOP", f"{_MICRO} each", "bound by",
                  "ms", "%"]  # fmt: skip
        tables.append(f"### {name}\n\n{_table(header, rows)}")
    return "## Ops of Llama-3.1-8B on N150\n\nOps of more than 0.1 % of a decode step.\n\n" + (
        "\n".join(tables)
    )


def _remains() -> str:
    model, mesh = "Llama-3.1-8B", "N150"
    [readme] = [
        r for r in published() if (r.model, r.mesh, r.source) == (model, mesh, "readme")
    ]  # fmt: skip
    rate = readme.tokens_per_s_per_user
    rates = [
        r.tokens_per_s_per_user
        for r in published()
        if (r.model, r.mesh, r.kind, r.batch) == (model, mesh, "measured", readme.batch)
    ]
    rows = []
    for name in KINDS:
        for text, given in (("stated", STATED), ("slower", SLOWER)):
            ours = decode_rate(model, mesh, name, given)
            rows.append([
                name, text, f"{1e3 / ours:.1f}", f"{ours:.1f}", f"{100 * ours / rate:.0f} %",
                f"{1e3 * (1 / rate - 1 / ours):+.1f}",
            ])  # fmt: skip
    return f"""\
## Llama-3.1-8B on N150: what remains

Beside the published {rate:g} tokens/s/user ({readme.source}: {1e3 / rate:.1f} ms a step of
{readme.batch} users):

{_table(["profile", "values", "ms", "tokens/s/user", "of the published", "ms to it"], rows)}
No assumption here covers the rest of upstream's own step beyond the estimate of its programs: a
host that reads logits or tokens between steps, cores at the banks that wait for their rows, a
context that grows. Published rates of the same settings and number of users range from
{min(rates):g} to {max(rates):g} tokens/s/user.

Change with another value of one assumption, in ms a step:

{_sensitivities(model, mesh)}"""


def _sensitivities(model: str, mesh: str) -> str:
    spec = mesh_spec(mesh)
    rows = []
    for key, stated in ASSUMPTIONS.items():
        if stated.other is None:
            continue
        given = {**STATED, key: stated.other}
        cells = []
        for make in KINDS.values():
            ops = decode(model, mesh, make(model, mesh))
            cells.append(
                f"{1e3 * (total_s(timed(ops, spec, given)) - total_s(timed(ops, spec))):+.1f}"
            )
        rows.append([f"{_value(stated.other)} {stated.text}", *cells])
    return _table(["assumption", *KINDS], rows)


def _beside() -> str:
    rows = []
    for rate in published():
        limit = 1 / max(decode_limit_s(rate.model, rate.mesh, UPSTREAM_PRECISION))
        rate_of = rate.tokens_per_s_per_user
        estimates = [
            decode_rate(rate.model, rate.mesh, name, given)
            for name in (_PROFILE, _UPSTREAM)
            for given in (SLOWER, STATED)
        ]
        rows.append([
            rate.model, rate.mesh, str(rate.batch), str(rate.prompt or ""), rate.kind, rate.source,
            f"{rate.ttft_ms:g}", f"{rate_of:g}",
            *(f"{100 * estimate / rate_of:.0f} %" for estimate in estimates),
            "yes" if rate_of > limit else "",
        ])  # fmt: skip
    header = ["model", "mesh", "users", "prompt", "kind", "source", "TTFT ms", "tokens/s/user",
              "`performance` of it, slower", "stated", "upstream's programs of it, slower",
              "stated", "above the limit"]  # fmt: skip
    return f"""\
## Beside published rates

Estimates, of 32 users whatever the users of a rate, with the slower and the stated values, in
percent of the published rates. The columns of upstream's programs on measured rates of 32 users
are the error of this page. "Above the limit": more than a chip's DRAM
allows with the weights of upstream's performance settings and all rows' contexts.

{_table(header, rows)}
On a p150 the limit is the arithmetic of the cores at its eight banks, not DRAM. LoFi (lofi) and two
cores beside each bank (two-readers; `num_workers_per_dram_bank` of ttnn's program) therefore help;
upstream's programs and the native ones use both there.
"""


def _prefill() -> str:
    rows = []
    for model in MODELS:
        for mesh in MESHES:
            ttfts = [
                f"{rate.ttft_ms:g}"
                for rate in published()
                if (rate.model, rate.mesh, rate.kind) == (model, mesh, "measured")
            ]
            rows += [
                [model, mesh, name, *_chunk_cells(model, mesh, name), ", ".join(ttfts)]
                for name in PROFILES
            ]
    header = ["model", "mesh", "profile"]
    header += [f"{n} tokens: GFLOP, limit ms, estimate ms" for n in CHUNKS]
    return f"""\
## Prefill

A chunk from position 0 to its last token's logits, on one chip, with the gaps of a replayed trace.
Chunks of up to 1,024 tokens are replayed. Longer ones are not; the time to send their commands is
left out, even if it is longer than that of the ops. The limit is the longer of a chunk's bytes at
the peak of DRAM and its arithmetic on all cores. Published times are measured, to the first token
of prompts of about 128 tokens, the host's time and the draw included.

{_table([*header, "published TTFT ms"], rows)}"""


def chunk(model: str, mesh: str, kind: Kind, num_tokens: int) -> list[Op]:
    """Return the ops of a chunk of the page."""
    spec, (precision, design) = mesh_spec(mesh), kind
    cores = CORES[spec.arch]
    return chunk_ops(
        MODELS[model], spec.num_chips, precision, design, num_banks=spec.chip.dram_banks,
        num_cores=cores.grid.num_cores, num_tokens=num_tokens,
    )  # fmt: skip


def _chunk_cells(model: str, mesh: str, profile: str) -> list[str]:
    spec, (precision, design) = mesh_spec(mesh), native(profile, model, mesh)
    cells = []
    for num_tokens in CHUNKS:
        ops = chunk(model, mesh, (precision, design), num_tokens)
        once = chunk(model, mesh, (precision, replace(design, products=_ONCE)), num_tokens)
        flops = sum(op.count * op.flops for op in ops)
        limit, whole = max(limit_s(once, spec)), total_s(timed(ops, spec))
        cells.append(f"{flops / 1e9:.0f}, {1e3 * limit:.0f}, {1e3 * whole:.0f}")
    return cells


_FOLLOWS = """\
## The simulated mesh

The [simulated mesh](simulated-mesh.md) follows the published rates, not this page: it uses the
measured row of a board and model if Tenstorrent has one (readme), and otherwise a model fitted on
those rows. Where the estimate above is below the published rate, expect a replica on silicon to be
slower than the simulated one.
"""


def _sources() -> str:
    rows = [[f"{name}", where] for name, where in SOURCES.items()]
    return f"## Sources\n\n{_table(['name', 'where'], rows)}"
