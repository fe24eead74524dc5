"""What a model computes on its way: the residual stream, and what each layer would say already."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from larql.errors import InputError
from larql.plots import load_plotting
from larql.session import LOGITS_CHUNK

if TYPE_CHECKING:
    from larql._core import Engine
    from larql.tokenizer import Tokenizer


class Trace:
    """The residual stream of some tokens.

    `ids` are the tokens, `residuals` f32 [layers + 1, tokens, width]: the stream after the embedding and each layer.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, ids: list[int], residuals: NDArray[np.float32]) -> None:
        self.ids = ids
        self.residuals = residuals
        self._engine = engine
        self._tokenizer = tokenizer

    @property
    def tokens(self) -> list[str]:
        """The text of each token, as the vocabulary writes it."""
        return [self._tokenizer.token_text(token) for token in self.ids]

    def logits(self, layer: int = -1) -> NDArray[np.float32]:
        """The logits [tokens, vocab] that the stream after a layer gives when it goes straight to the output head.

        `layer` counts from 0, the embedding; -1 is the last, whose logits are the model's.
        """
        n_states = len(self.residuals)
        if not -n_states <= layer < n_states:
            raise InputError(f"layer is {layer}; the trace has 0 (the embedding) to {n_states - 1}")
        states = self.residuals[layer]
        parts = [self._engine.unembed(states[i : i + LOGITS_CHUNK]) for i in range(0, len(states), LOGITS_CHUNK)]
        return np.concatenate(parts)

    def lens(self, k: int = 5) -> Lens:
        """The `k` most likely next tokens after each layer and position: the logit lens (nostalgebraist, 2020)."""
        if k < 1:
            raise InputError(f"k is {k}; it must be at least 1")
        layers = [_most_likely(self.logits(layer), k) for layer in range(len(self.residuals))]
        ids = np.stack([ids for ids, _ in layers])
        texts = [[[self._tokenizer.token_text(token) for token in row] for row in layer] for layer in ids.tolist()]
        return Lens(self.tokens, ids, np.stack([shares for _, shares in layers]), texts)

    def __repr__(self) -> str:
        return f"<Trace of {len(self.ids)} tokens, residuals {list(self.residuals.shape)}>"


@dataclass(frozen=True, repr=False)
class Lens:
    """The most likely next tokens by layer and position, the most likely first. In a notebook it is a table."""

    tokens: list[str]  # what was read: [tokens]
    ids: NDArray[np.int64]  # [layers + 1, tokens, k]
    probabilities: NDArray[np.float32]  # [layers + 1, tokens, k]
    texts: list[list[list[str]]]  # of `ids`, as the vocabulary writes them

    def plot(self) -> Any:
        """Draws the most likely token of each layer and position, coloured by its probability; matplotlib's Axes.

        Raises InputError when matplotlib is not installed.
        """
        pyplot = load_plotting("pyplot")
        n_layers, n_tokens = self.probabilities.shape[:2]
        figure, axes = pyplot.subplots(figsize=(1.5 + 1.1 * n_tokens, 1.5 + 0.3 * n_layers), layout="constrained")
        image = axes.imshow(self.probabilities[:, :, 0], aspect="auto", origin="lower", vmin=0, vmax=1, cmap="Blues")
        for layer in range(n_layers):
            for position in range(n_tokens):
                colour = "white" if self.probabilities[layer, position, 0] > 0.6 else "black"
                text = _label(self.texts[layer][position][0])
                axes.text(position, layer, text, ha="center", va="center", color=colour, fontsize=8, clip_on=True)
        axes.set_xticks(range(n_tokens), [_label(token) for token in self.tokens])
        axes.set(xlabel="token read", ylabel="layer", title="most likely next token")
        figure.colorbar(image, label="probability")
        return axes

    def __repr__(self) -> str:
        layers, tokens, k = self.ids.shape
        return f"<Lens of {layers - 1} layers and the embedding, {tokens} tokens, {k} most likely each>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(token)}</th>" for token in self.tokens)
        rows = [f"<tr><th>layer</th>{head}</tr>"]
        for layer in reversed(range(len(self.ids))):
            cells = "".join(map(_cell, self.texts[layer], self.probabilities[layer]))
            rows.append(f"<tr><th>{layer}</th>{cells}</tr>")
        return f"<table>{''.join(rows)}</table>"


def _cell(texts: list[str], probabilities: NDArray[np.float32]) -> str:
    """The most likely token, with the others where the mouse rests."""
    others = ", ".join(f"{text} {share:.0%}" for text, share in zip(texts, probabilities.tolist(), strict=True))
    colour = f"rgba(64, 128, 255, {0.8 * probabilities[0]:.2f})"
    return f'<td style="background: {colour}" title="{html.escape(others)}">{html.escape(texts[0])}</td>'


def _label(text: str) -> str:
    """A token for matplotlib, which takes $ for the begin of a formula and whose font lacks most scripts."""
    for written, shown in (("$", r"\$"), ("▁", "_"), ("Ġ", "_"), ("Ċ", "\\n")):
        text = text.replace(written, shown)
    return "".join(letter if letter.isascii() or (letter.isalpha() and ord(letter) < 0x250) else "?" for letter in text)


def _most_likely(logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and probabilities [tokens, k] of the highest logits of each row [tokens, vocab], the highest first."""
    k = min(k, logits.shape[1])
    some = np.argpartition(-logits, k - 1, axis=1)[:, :k]
    best = np.take_along_axis(some, np.argsort(-np.take_along_axis(logits, some, 1), axis=1, kind="stable"), 1)
    highest = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - highest).sum(axis=1, keepdims=True, dtype=np.float64)
    probabilities = np.exp(np.take_along_axis(logits, best, 1) - highest) / sums
    return best, probabilities.astype(np.float32)
