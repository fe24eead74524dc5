"""A record of `larql bench` for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Data = Mapping[str, Any]


def as_table(record: Data) -> str:
    """The record as lines, one block for each number of threads."""
    blocks = ["\n".join(_heading(record))]
    blocks += ["\n".join(_result(result)) for result in record.get("sweep", [record])]
    return "\n\n".join(blocks)


def _heading(record: Data) -> Iterator[str]:
    model, build = record["model"], record["build"]
    mix = ", ".join(f"{entry['type']} {entry['bytes'] / 1e6:.1f} MB" for entry in model["quant_mix"])
    commit = f" ({build['commit']})" if build["commit"] else ""
    yield _row("model", f"{model['name']}, {mix}")
    yield _row("machine", f"{record['machine']['cpu']}, {record['machine']['cores']} cores")
    yield _row("build", f"LARQL {build['version']}{commit}, {build['isa']}, {record['settings']['precision']}")


def _result(result: Data) -> Iterator[str]:
    prefill, decode, roofline = result["prefill"], result["decode"], result["roofline"]
    own = prefill["prompt"]
    yield _row("threads", result["threads"])
    yield _row("prefill", f"{prefill['tokens']:>5} tokens {_rate(prefill)}")
    yield _row("", f"{own['tokens']:>5} tokens {_rate(own)} (the prompt)")
    yield _row("decode", f"{decode['tokens']:>5} tokens {_rate(decode)}, from depth {decode['depth']}")
    yield _row(
        "", f"ms per token: mean {decode['ms_mean']:.2f}, p50 {decode['ms_p50']:.2f}, p99 {decode['ms_p99']:.2f}"
    )
    yield _row(
        "memory",
        f"{1e3 * decode['weights_gb_per_token']:.1f} MB of weights and {1e3 * decode['kv_gb_per_token']:.1f} MB of K/V "
        "for each token",
    )
    yield _row(
        "",
        f"{decode['gb_s']:.1f} GB/s, {100 * decode['roofline_share']:.1f} % of the roofline, "
        f"{roofline['gb_s']:.1f} GB/s [{roofline['gb_s_min']:.1f} to {roofline['gb_s_max']:.1f}]",
    )
    yield _row("ids", f"sha256 {decode['ids_sha256']}")
    for name, figures in (("decode", decode), ("prefill", prefill)):
        if "stages" in figures:
            yield from _stages(name, figures)
    if "peer" in result:
        yield from _peer(result["peer"], result["ratio"])
    if check := result.get("llama_bench"):
        speeds = f"prefill {check['prefill']['tok_s']:.1f} tok/s, decode {check['decode']['tok_s']:.1f} tok/s"
        yield _row("llama-bench", f"{speeds} (build {check['build']})")


def _stages(name: str, figures: Data) -> Iterator[str]:
    total = figures["stages_total_ms"]
    yield _row("stages", f"of {name}, ms of {total:.2f} in a run by itself")
    for stage, ms in figures["stages"].items():
        yield _row("", f"{stage:<12}{ms:>10.3f}{100 * ms / total:>7.1f} %")


def _peer(peer: Data, ratio: Data) -> Iterator[str]:
    yield _row(peer["name"], peer["version"])
    for name in ("prefill", "decode"):
        figures = peer[name]
        flash = "with" if figures["flash_attention"] else "without"
        yield _row("", f"{figures['tokens']:>5} tokens {_rate(figures)}, {name} {flash} flash attention")
    ratios = (f"{name} {_ratio(ratio[name])}" for name in ("prefill", "decode"))
    yield _row("ratio", f"{', '.join(ratios)} in {ratio['decode']['pairs']} pairs")


def _rate(figures: Data) -> str:
    return f"{figures['tok_s']:>8.1f} tok/s [{figures['tok_s_min']:.1f} to {figures['tok_s_max']:.1f}]"


def _ratio(figures: Data) -> str:
    return f"{figures['median']:.2f} [{figures['min']:.2f} to {figures['max']:.2f}]"


def _row(label: str, text: object) -> str:
    return f"{label:<12}{text}"
