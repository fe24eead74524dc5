"""The sampler as Python sees it; its steps are tested against their definitions in rust/sampler/tests.rs."""

import math
from typing import Any

import numpy as np
import pytest

from larql import _core, errors

VOCAB = 1000
LOGITS = (3 * np.random.default_rng(7).standard_normal(VOCAB)).astype(np.float32)


def draws(n: int, **options: Any) -> list[int]:
    sampler = _core.Sampler(**options)
    return [sampler.sample(LOGITS) for _ in range(n)]


def test_the_default_is_the_most_probable_token() -> None:
    assert draws(3) == [int(LOGITS.argmax())] * 3
    assert _core.Sampler().sample(np.zeros(VOCAB, np.float32)) == 0


def test_a_seed_repeats() -> None:
    assert draws(20, temperature=1.0, seed=5) == draws(20, temperature=1.0, seed=5)
    assert draws(20, temperature=1.0, seed=5) != draws(20, temperature=1.0, seed=6)
    assert draws(20, temperature=1.0) != draws(20, temperature=1.0)


@pytest.mark.parametrize(
    ("options", "n_kept"),
    [
        ({"top_k": 5}, 5),
        ({"top_k": 1}, 1),
        ({"top_k": VOCAB + 1, "top_p": 0.0}, 1),
        ({"min_p": 1.0}, 1),
        ({"temperature": 1e-6}, 1),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.01}, 3),
    ],
)
def test_filters_keep_the_most_probable(options: dict[str, Any], n_kept: int) -> None:
    drawn = set(draws(300, **{"temperature": 1.0, "seed": 1} | options))
    assert drawn == set(np.argsort(-LOGITS, kind="stable")[:n_kept].tolist())


def test_draws_follow_the_softmax() -> None:
    probabilities = np.exp(LOGITS.astype(np.float64) / 0.7)
    probabilities /= probabilities.sum()
    counts = np.bincount(draws(20_000, temperature=0.7, seed=3), minlength=VOCAB)
    common = probabilities > 5 / 20_000
    expected = 20_000 * probabilities[common]
    chi_square = ((counts[common] - expected) ** 2 / expected).sum()
    # Mean n and variance 2 n for n degrees of freedom.
    assert chi_square < common.sum() + 3 * math.sqrt(2 * common.sum())


def test_bias_and_penalty() -> None:
    best, second = np.argsort(-LOGITS)[:2].tolist()
    assert draws(1, bias={best: -math.inf}) == [second]
    assert draws(1, bias={17: 100.0}) == [17]
    # Sampled tokens are observed: the best one is penalised from the second draw on.
    assert draws(2, repeat_penalty=10.0) == [best, second]
    sampler = _core.Sampler(repeat_penalty=10.0)
    sampler.observe([best])
    assert sampler.sample(LOGITS) == second


def test_logprobs() -> None:
    sampler = _core.Sampler(temperature=2.0, top_k=50, seed=1, logprobs=True)
    assert sampler.last_logprob is None
    exact = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    for _ in range(20):
        token = sampler.sample(LOGITS)
        assert sampler.last_logprob == pytest.approx(exact[token], abs=1e-5)
    silent = _core.Sampler()
    silent.sample(LOGITS)
    assert silent.last_logprob is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature must be 0 or a positive number, not -0.5"),
        ({"temperature": math.nan}, "temperature must be 0 or a positive number, not NaN"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1, not 1.5"),
        ({"min_p": -1.0}, "min_p must be from 0 to 1, not -1"),
        ({"repeat_penalty": 0.0}, "repeat_penalty must be a positive number, not 0"),
        ({"bias": {7: math.inf}}, "the bias of token 7 must be a number, or -inf to ban it, not inf"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InputError) as raised:
        _core.Sampler(**options)
    assert str(raised.value) == message


def test_tokens_that_are_not_in_the_vocabulary() -> None:
    with pytest.raises(errors.InputError, match="the biased token 1000 is not in the vocabulary of 1000"):
        draws(1, bias={VOCAB: 1.0})
    sampler = _core.Sampler(repeat_penalty=1.1)
    sampler.observe([VOCAB + 5])
    with pytest.raises(errors.InputError, match="the observed token 1005 is not in the vocabulary of 1000"):
        sampler.sample(LOGITS)


def test_every_token_banned() -> None:
    with pytest.raises(errors.InputError, match="no token is left to choose"):
        _core.Sampler(bias={0: -math.inf, 1: -math.inf}).sample(np.zeros(2, np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits(temperature: float, broken: float) -> None:
    logits = LOGITS.copy()
    logits[500] = broken
    with pytest.raises(errors.LarqlError, match="a logit is NaN or infinite"):
        _core.Sampler(temperature=temperature).sample(logits)
