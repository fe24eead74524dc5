"""How far each activation format takes the logits from the f32 reference, by simulation in numpy.

usage: python bench/trials/activation-format/errors.py FOLDER [--models NAME ...] [--tokens N] [--json OUT.json]

FOLDER holds NAME.gguf for each NAME.json of tests/golden/kl, whose ids are the text. The input of every matrix product
with weights (all linear layers and the head) is quantised and put back into f32, keys and values are rounded to f16,
and all else is the f32 arithmetic of tests/reference.py. Integer sums being exact, that is what a kernel computes, up
to the rounding of f32 sums.

The model's answer at a single position says little by itself, so the error at the first position is also taken over
64 different tokens, each as a text of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
import reference  # noqa: E402
from reference import Array, Reference  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "kl"
GROUP = 256  # elements that share the f32 scale of a two-level format
LARGEST = 127  # quant
MULTIPLIERS = 63  # of a group's f32 scale: 1 to 63
N_FIRSTS = 64  # tokens that are run as texts of their own
POSITIONS_PER_CHUNK = 64  # of the head: 64 rows of 262,144 logits in f64 are 134 MB
K_QUANTS = {Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}
FIRST_LIMIT = {"qwen2.5-coder-1.5b": 0.05}


def quantise(x: Array, width: int, two_level: bool = False, n_apart: int = 0) -> Array:
    """x [T, n] in int8 blocks of `width` and back; the last group of 256 holds the rest.

    The `n_apart` largest elements of each vector stay as they are, and their blocks do without them.
    """
    n_tokens, columns = x.shape
    apart = np.argpartition(np.abs(x), columns - n_apart - 1)[:, columns - n_apart :]
    rest = x.copy()
    np.put_along_axis(rest, apart, 0, axis=-1)
    padded = np.pad(rest, ((0, 0), (0, -columns % GROUP)))
    blocks = padded.reshape(n_tokens, -1, GROUP // width, width)  # [T, groups, blocks, width]
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(LARGEST)
    if two_level:
        unit = scales.max(axis=-2, keepdims=True) / np.float32(MULTIPLIERS)
        # Rounded up, so that no quant exceeds 127.
        scales = unit * np.clip(np.ceil(divide(scales, unit)), 1, MULTIPLIERS)
    quants = np.clip(np.rint(divide(blocks, scales)), -LARGEST, LARGEST)
    decoded = (quants * scales).reshape(n_tokens, -1)[:, :columns]
    np.put_along_axis(decoded, apart, np.take_along_axis(x, apart, axis=-1), axis=-1)
    return decoded


def divide(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def as_llama_cpp(x: Array, kind: Kind) -> Array:
    """One scale per 256 for K-quants, else one per 32 (kept in f32 here, in f16 there)."""
    return quantise(x, 256 if kind in K_QUANTS else 32)


@dataclass(frozen=True)
class Form:
    """A format of activations and of keys and values."""

    quantise: Callable[[Array, Kind], Array] = lambda x, _: x
    f16_cache: bool = True


EXACT = Form(f16_cache=False)
FORMS = {
    "none, f16 K/V": Form(),
    "256": Form(lambda x, _: quantise(x, 256)),
    "32 plain": Form(lambda x, _: quantise(x, 32)),
    "32 two-level": Form(lambda x, _: quantise(x, 32, two_level=True)),
    "16 plain": Form(lambda x, _: quantise(x, 16)),
    "16 two-level": Form(lambda x, _: quantise(x, 16, two_level=True)),
    "as llama.cpp": Form(as_llama_cpp),
    "32 plain, 2 apart": Form(lambda x, _: quantise(x, 32, n_apart=2)),
    "32 two-level, 2 apart": Form(lambda x, _: quantise(x, 32, two_level=True, n_apart=2)),
    "16 plain, 2 apart": Form(lambda x, _: quantise(x, 16, n_apart=2)),
}


def f16(x: Array) -> Array:
    return x.clip(-65504, 65504).astype(np.float16).astype(np.float32)


class Trial(Reference):
    """The reference pass in several forms, layer by layer, so that each weight is decoded once for all of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.form = EXACT
        self.alone = False  # every token is a text of its own
        self.decoded: dict[str, Array] = {}

    def streams(self, ids: Sequence[int], firsts: Sequence[int], forms: Sequence[Form]) -> list[tuple[Array, Array]]:
        """For each form the residual streams [T, D] before the last norm: of the text, and of each of `firsts`."""
        streams = [(self.embed(ids), self.embed(firsts)) for _ in forms]
        for layer in range(self.n_layers):
            for i, self.form in enumerate(forms):
                text, singles = streams[i]
                self.alone = False
                text = self.layer(layer, text)
                self.alone = True
                streams[i] = text, self.layer(layer, singles)
            self.decoded.clear()
        return streams

    def head(self, x: Array, form: Form) -> Array:
        """Logits [T, V] from the residual stream."""
        name = "output" if "output.weight" in self.tensors else "token_embd"
        self.form = form
        return reference.soft_cap(self.linear(name, self.norm("output_norm", x)), self.final_cap)

    def linear(self, name: str, x: Array) -> Array:
        return super().linear(name, self.form.quantise(x, self.tensors[f"{name}.weight"].tensor_type))

    def attention(self, layer: int, x: Array) -> Array:
        with mock.patch.object(reference, "attend", self.attend):
            return super().attention(layer, x)

    def attend(self, q: Array, k: Array, v: Array, *arguments: Any) -> Array:
        if self.form.f16_cache:
            k, v = f16(k), f16(v)
        if self.alone:  # the only visible value has all the weight
            return np.repeat(v, q.shape[1] // v.shape[1], axis=1).reshape(len(v), -1)
        return attend(q, k, v, *arguments)

    def weight(self, name: str) -> Array:
        if name not in self.decoded:
            self.decoded[name] = super().weight(name)
        return self.decoded[name]


attend = reference.attend


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """In f64, since KL is a small difference of logarithms."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def distances(model: Trial, forms: Sequence[Form], streams: Sequence[Array]) -> tuple[Array, Array]:
    """KL(f32 || form) and whether the most likely token is the same, both [forms, T]; streams[0] is of f32."""
    kl, same = [], []
    for start in range(0, len(streams[0]), POSITIONS_PER_CHUNK):
        chunk = slice(start, start + POSITIONS_PER_CHUNK)
        truth = log_softmax(model.head(streams[0][chunk], EXACT))
        answers = [log_softmax(model.head(x[chunk], form)) for form, x in zip(forms, streams[1:], strict=True)]
        kl.append([(np.exp(truth) * (truth - answer)).sum(axis=-1) for answer in answers])
        same.append([truth.argmax(axis=-1) == answer.argmax(axis=-1) for answer in answers])
    return np.concatenate(kl, axis=-1), np.concatenate(same, axis=-1)


def evaluate(path: Path, golden: dict[str, Any], n_tokens: int | None) -> dict[str, Any]:
    """The figures of every form on one model."""
    ids: list[int] = golden["ids"][:n_tokens]
    firsts = list(dict.fromkeys(golden["ids"]))[:N_FIRSTS]
    model = Trial(path)
    texts, singles = zip(*model.streams(ids, firsts, [EXACT, *FORMS.values()]), strict=True)
    kl, same = distances(model, list(FORMS.values()), texts)
    kl_alone, _ = distances(model, list(FORMS.values()), singles)
    figures = {
        name: {
            "kl_first": float(kl[i, 0]),
            "kl_mean_after_first": float(kl[i, 1:].mean()),
            "kl_median": float(np.median(kl[i])),
            "kl_p99": float(np.percentile(kl[i], 99)),
            "top1": float(same[i].mean()),
            "kl_first_of_others": {"mean": float(kl_alone[i].mean()), "max": float(kl_alone[i].max())},
        }
        for i, name in enumerate(FORMS)
    }
    peer = golden["llama.cpp"]
    limits = {"kl_mean_after_first": peer["kl_mean_after_first"] / 2, "kl_first": FIRST_LIMIT.get(golden["model"])}
    for form in figures.values():
        form["within_limits"] = all(limit is None or form[name] <= limit for name, limit in limits.items())
    return {
        "tokens": len(ids),
        "single_tokens": len(firsts),
        "limits": limits,
        "llama.cpp (measured)": peer,
        "forms": figures,
    }


def table(name: str, result: dict[str, Any]) -> str:
    """For people, in Markdown."""
    limit = result["limits"]["kl_mean_after_first"]
    lines = [
        f"**{name}**, {result['tokens']} tokens; limit of the mean {limit:.6f}\n",
        "| activations | mean KL after the first | of the limit | KL first | first of 64 tokens: mean | max | within |",
        "|---|---|---|---|---|---|---|",
    ]
    for form, figures in result["forms"].items():
        mean, others = figures["kl_mean_after_first"], figures["kl_first_of_others"]
        cells = [form, f"{mean:.6f}", f"{mean / limit:.2f}", f"{figures['kl_first']:.5f}"]
        cells += [f"{others['mean']:.5f}", f"{others['max']:.4f}"]
        lines.append(f"| {' | '.join(cells)} | {'yes' if figures['within_limits'] else 'no'} |")
    peer = result["llama.cpp (measured)"]
    mean = peer["kl_mean_after_first"]
    cells = ["llama.cpp, measured", f"{mean:.6f}", f"{mean / limit:.2f}", f"{peer['kl_first']:.5f}"]
    lines.append(f"| {' | '.join(cells)} | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of activation formats, by simulation.")
    parser.add_argument("folder", type=Path, help="holds NAME.gguf")
    parser.add_argument("--models", nargs="+", default=sorted(path.stem for path in GOLDEN.glob("*.json")))
    parser.add_argument("--tokens", type=int, help="of the text, from its start; all by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.models:
        golden = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
        results[name] = evaluate(arguments.folder / f"{name}.gguf", golden, arguments.tokens)
        print(table(name, results[name]), end="\n\n", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
