"""Sessions and generation: chunks, going back, failures, end tokens, stop strings, timings."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import larql
from fake_core import FakeEngine, FakeSampler, FakeTokenizer
from larql.errors import ContextError, InputError
from larql.generate import GenerationConfig, StopStrings, TextStream, generate, generate_ids
from larql.session import PREFILL_CHUNK, Session

VOCAB = 50
NEXT = FakeEngine(lambda ids: (ids[-1] + 1) % VOCAB)


def make_engine(**options: Any) -> FakeEngine:
    """Counts: after token n comes n + 1."""
    return FakeEngine(lambda ids: (ids[-1] + 1) % VOCAB, **options)


def make_session(engine: FakeEngine) -> Session:
    return Session(engine)


def expect(session: Session, ids: list[int]) -> None:
    """The session holds `ids`, in itself and in its cache, and predicts what follows them."""
    assert session.ids == ids
    assert len(session) == len(ids)
    assert session._sequence.ids == ids
    if ids:
        assert session.logits.argmax() == (ids[-1] + 1) % VOCAB


def some_ids(count: int) -> list[int]:
    return [i * 7 % VOCAB for i in range(count)]


# Sessions


def test_feed_in_one_go_and_in_pieces() -> None:
    ids = some_ids(2 * PREFILL_CHUNK + 5)
    engine = make_engine()
    session = make_session(engine)
    session.feed(ids)
    assert engine.sizes == [PREFILL_CHUNK, PREFILL_CHUNK, 5]
    expect(session, ids)

    pieces = make_session(make_engine())
    for start in range(0, len(ids), 7):
        pieces.feed(ids[start : start + 7])
    expect(pieces, ids)


def test_feed_takes_any_integers() -> None:
    session = make_session(make_engine())
    session.feed(np.array([1, 2]))
    session.feed(iter([3]))
    session.feed([])
    expect(session, [1, 2, 3])


def test_logits_are_one_read_only_row() -> None:
    session = make_session(make_engine())
    with pytest.raises(InputError, match="no logits before the first token"):
        _ = session.logits
    session.feed([1])
    assert session.logits.shape == (VOCAB,)
    assert session.logits.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        session.logits[0] = 1


def test_ids_are_a_copy() -> None:
    session = make_session(make_engine())
    session.feed([1])
    session.ids.append(2)
    expect(session, [1])


@pytest.mark.parametrize("window", [False, True])
def test_truncate(window: bool) -> None:
    ids = some_ids(PREFILL_CHUNK + 100)
    session = make_session(make_engine(window=window))
    session.feed(ids)
    for length in (len(ids), PREFILL_CHUNK + 1, 3, 0):
        session.truncate(length)
        expect(session, ids[:length])
    session.feed([1])
    expect(session, [1])


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_out_of_range(length: int) -> None:
    session = make_session(make_engine())
    session.feed([1, 2, 3])
    with pytest.raises(InputError, match=f"cannot truncate to {length} tokens; the session has 3"):
        session.truncate(length)
    expect(session, [1, 2, 3])


def test_forks_go_their_own_ways() -> None:
    session = make_session(make_engine())
    session.feed([1, 2])
    other = session.fork()
    other.feed([30])
    session.feed([40, 41])
    expect(other, [1, 2, 30])
    expect(session, [1, 2, 40, 41])


def test_progress_of_a_long_prompt() -> None:
    n = 2 * PREFILL_CHUNK + 5
    seen: list[tuple[int, int]] = []
    session = make_session(make_engine())
    session.feed(some_ids(n), lambda done, total: seen.append((done, total)))
    assert seen == [(done, n) for done in (0, PREFILL_CHUNK, 2 * PREFILL_CHUNK, n)]
    seen.clear()
    session.sample([1], FakeSampler(), lambda done, total: seen.append((done, total)))
    assert seen == [(0, 1), (1, 1)]


def test_an_error_of_the_progress_leaves_the_session_as_it_was() -> None:
    def stop(done: int, _total: int) -> None:
        if done:
            raise KeyboardInterrupt

    session = make_session(make_engine())
    session.feed([1, 2])
    for n in (3, PREFILL_CHUNK + 3):
        with pytest.raises(KeyboardInterrupt):
            session.feed(some_ids(n), stop)
        expect(session, [1, 2])


@pytest.mark.parametrize(
    ("held", "wanted", "kept"),
    [
        ([], [1, 2], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 9, 9], 2),
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3], [1], 0),
        ([1, 2], [5, 6], 0),
        ([1, 2], [], 0),
    ],
)
def test_keep_common(held: list[int], wanted: list[int], kept: int) -> None:
    session = make_session(make_engine())
    session.feed(held)
    assert session.keep_common(wanted) == kept
    expect(session, wanted[:kept])


def test_keep_common_of_a_window_that_has_moved_on() -> None:
    session = make_session(make_engine(window=True))
    session.feed([1, 2, 3])
    for token in (4, 5, 6):
        session.feed([token])
    assert session.keep_common([1, 2, 3, 4, 5, 6, 7]) == 6
    assert session.keep_common([1, 2, 9]) == 0  # the snapshot from before the prompt
    expect(session, [])


@pytest.mark.parametrize("window", [False, True])
def test_sample(window: bool) -> None:
    session = make_session(make_engine(window=window))
    assert session.sample(some_ids(PREFILL_CHUNK + 3), FakeSampler()) == some_ids(PREFILL_CHUNK + 3)[-1] + 1
    assert session.sample([5], FakeSampler()) == 6
    expect(session, [*some_ids(PREFILL_CHUNK + 3), 5])
    with pytest.raises(InputError, match="no token to continue from"):
        session.sample([], FakeSampler())


def test_too_many_tokens() -> None:
    session = make_session(make_engine(context=10))
    session.feed([1, 2, 3])
    with pytest.raises(ContextError, match="11 tokens do not fit in a context of 10") as caught:
        session.feed([0] * 8)
    assert (caught.value.needed, caught.value.limit) == (11, 10)
    expect(session, [1, 2, 3])
    session.feed([0] * 7)
    expect(session, [1, 2, 3] + [0] * 7)


@pytest.mark.parametrize("token", [-1, 2**32, VOCAB])
def test_ids_out_of_range_change_nothing(token: int) -> None:
    session = make_session(make_engine())
    session.feed([1])
    with pytest.raises(InputError, match=f"token id {token} is out of range"):
        session.feed([2] * PREFILL_CHUNK + [token])
    expect(session, [1])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("count", [1, PREFILL_CHUNK, 2 * PREFILL_CHUNK + 1])
def test_a_failed_feed_changes_nothing(count: int, window: bool, late: bool) -> None:
    n_forwards = -(-count // PREFILL_CHUNK)
    for failing in range(n_forwards):
        engine = make_engine(window=window)
        engine.late = late
        session = make_session(engine)
        session.feed([3, 4])
        engine.fail[1 + failing] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            session.feed(some_ids(count))
        expect(session, [3, 4])
        session.feed([5])
        expect(session, [3, 4, 5])


def test_a_failed_truncate_changes_nothing() -> None:
    engine = make_engine(window=True)
    session = make_session(engine)
    session.feed([1, 2, 3])
    engine.fail[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        session.truncate(2)
    expect(session, [1, 2, 3])


# Ids


def ids_of(session: Session, prompt: list[int], end_ids: set[int], limit: int) -> list[int]:
    return list(generate_ids(session, prompt, FakeSampler(), end_ids, limit))


def test_ids_end_at_the_limit() -> None:
    engine = make_engine()
    session = make_session(engine)
    assert ids_of(session, [1, 2, 3], set(), 4) == [4, 5, 6, 7]
    assert engine.sizes == [3, 1, 1, 1]
    expect(session, [1, 2, 3, 4, 5, 6])  # the last one is not fed


@pytest.mark.parametrize("end_ids", [{6}, {6, 8}, {40, 6}])
def test_ids_end_before_any_end_token(end_ids: set[int]) -> None:
    assert ids_of(make_session(make_engine()), [3], end_ids, 10) == [4, 5]
    assert ids_of(make_session(make_engine()), [5], end_ids, 10) == []


# Stop strings


def cut_by(stops: list[str], pieces: list[str]) -> str:
    """The whole text, with every check that streaming it must pass."""
    matcher, text = StopStrings(stops), ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.found:
            assert matcher.flush() == ""
            return text
    return text + matcher.flush()


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["a", "b"], "ab"),
        (["END"], ["text E", "N", "D more"], "text "),
        (["END"], ["text E", "N", "d"], "text ENd"),
        (["END"], ["text EN"], "text EN"),
        (["END"], ["EN", "EN", "D"], "EN"),
        (["aab"], ["aa", "a", "b"], "a"),
        (["abcd", "c"], ["abc", "d"], "ab"),
        (["abcd", "c"], ["abcd"], "ab"),  # what is complete first, however the text was cut
        (["bc", "c"], ["abc"], "a"),
        (["\n\n"], ["one\n", "\ntwo"], "one"),
        (["é"], ["caf", "é!"], "caf"),
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], expected: str) -> None:
    assert cut_by(stops, pieces) == expected


def test_stop_strings_do_not_depend_on_the_pieces() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert cut_by(stops, pieces) == expected, (text, stops, pieces)


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["END", "NO"])
    assert [matcher.push(piece) for piece in ("a", "bE", "N", "x", "ENN")] == ["a", "b", "", "ENx", "EN"]


# Text


WORDS = ["<s>", " a", " b", " END", " c", b"\xc3", b"\xa9", " d", "</s>"]


def make_stream(prompt: list[int], engine: FakeEngine | None = None, **options: Any) -> TextStream:
    tokenizer = FakeTokenizer(WORDS, end_ids=[8])
    session = make_session(engine or make_engine())
    return TextStream(session, tokenizer, FakeSampler(), prompt, GenerationConfig(**options), load_s=1.5)


def test_text_to_the_end_token() -> None:
    stream = make_stream([0])
    assert stream.finish_reason is None
    assert list(stream) == [" a", " b", " END", " c", "é", " d"]
    assert stream.ids == [1, 2, 3, 4, 5, 6, 7]
    assert stream.prompt_ids == [0]
    assert stream.finish_reason == "stop"
    assert stream.logprobs is None
    assert list(stream) == []


def test_text_to_the_limit() -> None:
    result = generate(make_stream([0], max_tokens=2))
    assert (result.text, result.ids, result.finish_reason) == (" a b", [1, 2], "length")


def test_the_end_token_right_after_the_limit_is_not_seen() -> None:
    assert generate(make_stream([5], max_tokens=2)).finish_reason == "length"
    assert generate(make_stream([5], max_tokens=3)).finish_reason == "stop"


def test_an_incomplete_character_at_the_end() -> None:
    result = generate(make_stream([3], max_tokens=2))
    assert (result.text, result.ids) == (" c\ufffd", [4, 5])


def test_text_to_a_stop_string() -> None:
    result = generate(make_stream([0], stop=["END c"]))
    assert (result.text, result.finish_reason) == (" a b ", "stop")
    assert result.ids == [1, 2, 3, 4]
    assert generate(make_stream([0], stop="b")).text == " a "


def test_a_stop_string_in_the_last_token_wins_over_the_limit() -> None:
    assert generate(make_stream([0], stop="b", max_tokens=2)).finish_reason == "stop"
    assert generate(make_stream([3], stop="\ufffd", max_tokens=2)).finish_reason == "stop"


def test_text_held_back_comes_out_at_the_end() -> None:
    assert list(make_stream([6], stop=" done")) == [" d"]
    assert list(make_stream([1], stop=" bc", max_tokens=1)) == [" b"]


def test_nothing_to_say() -> None:
    result = generate(make_stream([7]))
    assert (result.text, result.ids, result.finish_reason) == ("", [], "stop")
    assert result.timings.ttft_s > 0
    assert result.timings.decode_tok_s is None


def test_logprobs() -> None:
    assert generate(make_stream([0], max_tokens=3, logprobs=True)).logprobs == [-0.5] * 3


def test_a_session_is_not_fed_again_what_it_holds() -> None:
    engine = make_engine()
    session, tokenizer = make_session(engine), FakeTokenizer(WORDS, end_ids=[8])

    def answer(prompt: list[int]) -> Any:
        return generate(TextStream(session, tokenizer, FakeSampler(), prompt, GenerationConfig(max_tokens=3)))

    first = answer([0, 1])
    assert (first.ids, first.reused) == ([2, 3, 4], 0)
    engine.sizes.clear()
    second = answer([0, 1, 2, 3, 4, 5])
    assert (second.ids, second.reused) == ([6, 7], 4)  # the last id of an answer is not fed
    assert engine.sizes[0] == 2
    third = answer([0, 1, 3])
    assert (third.ids, third.reused) == ([4, 5, 6], 2)
    assert third.prompt_ids == [0, 1, 3]


def test_progress_follows_the_prompt_only() -> None:
    seen: list[tuple[int, int]] = []
    session, tokenizer = make_session(make_engine()), FakeTokenizer(WORDS, end_ids=[8])
    config = GenerationConfig(max_tokens=3)
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    generate(TextStream(session, tokenizer, FakeSampler(), [0, 1], config, progress=progress))
    assert seen == [(0, 2), (2, 2)]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="the prompt has no tokens"):
        make_stream([])


def test_a_prompt_must_leave_room() -> None:
    with pytest.raises(ContextError, match="need 5 tokens; the context holds 4") as caught:
        make_stream([0, 1, 2, 3], make_engine(context=4))
    assert (caught.value.needed, caught.value.limit) == (5, 4)


def test_the_context_limits_the_text() -> None:
    result = generate(make_stream([0, 1], make_engine(context=4)))
    assert (result.ids, result.finish_reason) == ([2, 3], "length")


def test_an_interrupt_keeps_what_there_is() -> None:
    engine = make_engine()
    engine.fail[2] = KeyboardInterrupt()
    stream = make_stream([0], engine)
    assert [next(stream), next(stream)] == [" a", " b"]
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert stream.finish_reason == "cancelled"
    assert stream.ids == [1, 2]


def test_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    class SlowEngine(FakeEngine):
        def forward(self, batch: Any) -> Any:
            nonlocal now
            now += 2.0 if len(batch) > 1 else 0.25
            return super().forward(batch)

    timings = generate(make_stream([0, 0, 0, 0], SlowEngine(NEXT.rule), max_tokens=5)).timings
    assert timings.load_s == 1.5
    assert timings.ttft_s == 2.0
    assert timings.prefill_tok_s == 4 / 2.0
    assert timings.decode_tok_s == 4 / 1.0  # five tokens have four intervals

    assert generate(make_stream([0], SlowEngine(NEXT.rule), max_tokens=1)).timings.decode_tok_s is None


# Options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repeat_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
    ],
)
def test_bad_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{option} is .*; it must be "):
        GenerationConfig(**{option: value})


def test_good_options() -> None:
    config = GenerationConfig(
        max_tokens=np.int64(3),
        temperature=1,
        top_k=40,
        top_p=np.float32(0.5),
        seed=2**64 - 1,
        stop=["a"],
    )
    assert config.temperature == 1
    assert GenerationConfig(stop="ab").stop == ("ab",)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'top_q'"):
        GenerationConfig(top_q=1)


# The real thing


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> larql.Model:
    return larql.load(gemma_path)


def test_generate_and_stream_agree(gemma: larql.Model) -> None:
    prompt = "The capital of France is"
    result = gemma.generate(prompt, max_tokens=12)
    assert result.text.startswith(" the capital")
    assert result.prompt_ids == gemma.encode(prompt)
    assert gemma.decode(result.prompt_ids + result.ids) == "<bos>" + prompt + result.text
    stream = gemma.stream(result.prompt_ids, max_tokens=12)
    assert "".join(stream) == result.text
    assert stream.ids == result.ids


def test_options_go_before_the_config(gemma: larql.Model) -> None:
    config = larql.GenerationConfig(max_tokens=3, logprobs=True)
    result = gemma.generate("Once upon a", config, max_tokens=2)
    assert len(result.ids) == 2
    assert result.logprobs is not None
    assert all(value <= 0 for value in result.logprobs)
    with pytest.raises(TypeError, match="top_q"):
        gemma.generate("Once", top_q=1)


def test_logits_scores_and_logprobs_agree(gemma: larql.Model) -> None:
    result = gemma.generate("Once upon a time", max_tokens=4, logprobs=True)
    ids = result.prompt_ids + result.ids
    logits = gemma.logits(ids)
    assert logits.shape == (len(ids), 262_144)
    assert logits[len(result.prompt_ids) - 1].argmax() == result.ids[0]
    scores = gemma.score(ids)
    assert scores.shape == (len(ids) - 1,)
    np.testing.assert_allclose(scores[-4:], result.logprobs, atol=1e-4)

    session = gemma.session()
    session.feed(ids)
    np.testing.assert_array_equal(session.logits, logits[-1])
    session.truncate(len(ids) - 2)
    np.testing.assert_array_equal(session.logits, logits[-3])


def test_a_text_is_scored_from_its_first_token(gemma: larql.Model) -> None:
    text = "Paris is the capital of France."
    assert len(gemma.score(text)) == len(gemma.encode(text, bos=False))
    assert gemma.score(text).sum() > gemma.score("Paris is the capital of Spain.").sum()


def test_bad_input_to_a_model(gemma: larql.Model) -> None:
    with pytest.raises(InputError, match="no tokens"):
        gemma.logits([])
    with pytest.raises(InputError, match="at least two tokens"):
        gemma.score([2])
    with pytest.raises(InputError, match="token id 262144 is out of range"):
        gemma.generate([2, 262_144])
    with pytest.raises(InputError, match="token id -1 is out of range"):
        gemma.score([2, -1])


def test_threads_share_a_model(gemma: larql.Model) -> None:
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3,"]
    alone = [gemma.generate(prompt, max_tokens=8).ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: gemma.generate(prompt, max_tokens=8).ids, prompts))
    assert together == alone


def test_a_seed_repeats_itself(gemma: larql.Model) -> None:
    def draw(seed: int) -> list[int]:
        return gemma.generate("Once upon a time", max_tokens=12, temperature=1.5, seed=seed).ids

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(
    ("option", "value"), [("threads", 0), ("context", 0), ("context", 10**6), ("precision", "f64")]
)
def test_load_refuses_bad_options(gemma_path: Path, option: str, value: Any) -> None:
    with pytest.raises(InputError, match=option):
        larql.load(gemma_path, **{option: value})


def test_a_long_prompt_is_refused(gemma_path: Path) -> None:
    model = larql.load(gemma_path, context=8)
    with pytest.raises(ContextError, match="the context holds 8"):
        model.generate([2] * 8)
    with pytest.raises(ContextError, match="9 tokens do not fit in a context of 8"):
        model.logits([2] * 9)


def test_a_kept_session_gives_the_text_of_a_cold_start(gemma_path: Path) -> None:
    model = larql.load(gemma_path, threads=2)
    story = "The lighthouse keeper wrote every evening what the sea had done. " * 45  # past the window of 512
    session = model.session()
    first = model.generate(story, session=session, max_tokens=8)
    assert first.reused == 0
    longer = first.prompt_ids + first.ids + model.encode("Then the storm came.", bos=False)
    warm, cold = (model.generate(longer, session=s, max_tokens=12, logprobs=True) for s in (session, None))
    assert warm.reused == len(first.prompt_ids) + len(first.ids) - 1
    assert (warm.text, warm.logprobs) == (cold.text, cold.logprobs)
    back = model.generate([*first.prompt_ids[:400], 5], session=session, max_tokens=4)
    assert back.reused <= 400
    assert back.ids == model.generate([*first.prompt_ids[:400], 5], max_tokens=4).ids


def test_a_session_of_another_model_is_refused(smollm_path: Path) -> None:
    model, other = (larql.load(smollm_path, threads=1) for _ in range(2))
    with pytest.raises(InputError, match="the session belongs to another model"):
        model.generate("Once", session=other.session(), max_tokens=1)
