"""The residual stream and the logit lens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import larql
from larql.errors import ContextError, InputError
from tiny_models import write_tiny_model

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def model(smollm_path: Path) -> larql.Model:
    return larql.load(smollm_path, threads=2)


@pytest.fixture(scope="module")
def trace(model: larql.Model) -> larql.Trace:
    return model.trace(PROMPT)


def test_the_last_layer_gives_the_models_logits(model: larql.Model, trace: larql.Trace) -> None:
    assert trace.residuals.shape == (len(model.config.layers) + 1, len(trace.ids), model.config.hidden_size)
    assert trace.residuals.dtype == np.float32
    assert trace.logits().tobytes() == model.logits(PROMPT).tobytes()


def test_a_long_text_is_traced_in_chunks(smollm_path: Path) -> None:
    model = larql.load(smollm_path, threads=2, context=600)
    ids = [(11 * i) % 50 + 300 for i in range(600)]
    trace = model.trace(ids)
    assert trace.ids == ids
    assert trace.logits(-1).tobytes() == model.logits(ids).tobytes()
    with pytest.raises(ContextError, match="601 tokens do not fit"):
        model.trace([*ids, 3])


def test_the_lens_ranks_tokens_of_each_layer(model: larql.Model, trace: larql.Trace) -> None:
    lens = trace.lens(3)
    assert lens.ids.shape == lens.probabilities.shape == (len(trace.residuals), len(trace.ids), 3)
    for layer in (0, 7, len(trace.residuals) - 1):
        logits = trace.logits(layer).astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        ranked = -np.sort(-shares, axis=1)[:, :3]
        np.testing.assert_allclose(lens.probabilities[layer], ranked, rtol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(shares, lens.ids[layer], 1), ranked, rtol=1e-6)
    assert lens.texts[-1][-1][0] == model.tokenizer.token_text(model.generate(PROMPT, max_tokens=1).ids[0])


def test_more_than_the_vocabulary_is_all_of_it(tmp_path: Path) -> None:
    model = larql.load(write_tiny_model(tmp_path / "tiny.gguf", "llama", "F32"), threads=1, cache=False)
    lens = model.trace([3, 4]).lens(10**6)
    assert lens.ids.shape[2] == model.config.vocab_size
    np.testing.assert_allclose(lens.probabilities.sum(axis=2), 1, rtol=1e-4)


def test_a_notebook_shows_a_table(trace: larql.Trace) -> None:
    lens = trace.lens(2)
    table = lens._repr_html_()
    assert table.count("<tr>") == len(trace.residuals) + 1
    assert table.count("<td") == len(trace.residuals) * len(trace.ids)
    assert repr(lens) == f"<Lens of 30 layers and the embedding, {len(trace.ids)} tokens, 2 most likely each>"


def test_the_plot_has_every_token(trace: larql.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib, which draws the plot, is not installed")
    pyplot.switch_backend("Agg")
    axes = trace.lens().plot()
    assert len(axes.texts) == len(trace.residuals) * len(trace.ids)
    axes.figure.canvas.draw()
    pyplot.close(axes.figure)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        trace.lens().plot()


def test_what_makes_no_sense(model: larql.Model, trace: larql.Trace) -> None:
    with pytest.raises(InputError, match="no tokens to trace"):
        model.trace([])
    with pytest.raises(InputError, match="out of range"):
        model.trace([10**6])
    with pytest.raises(InputError, match="k is 0"):
        trace.lens(0)
    with pytest.raises(InputError, match="layer is 31; the trace has 0"):
        trace.logits(31)
