"""The Rust core. Arrays are C-contiguous; token ids and positions are plain integers."""

import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Engine",
    "Gguf",
    "Ladder",
    "Matrix",
    "Sampler",
    "Sequence",
    "Vindex",
    "__version__",
    "build_profile",
    "default_threads",
    "dequantize",
    "gate",
    "measure_peak",
    "measure_read",
    "quantize_activations",
    "rms_norm",
    "softcap",
    "write_weights",
]

__version__: str
build_profile: str

@final
class Gguf:
    """An open GGUF file (all shards), mapped and checked.

    Raises ModelError when the file cannot be used.
    """

    def __new__(cls, path: str | os.PathLike[str]) -> Gguf: ...
    @property
    def version(self) -> int:
        """GGUF version, 2 or 3."""
    @property
    def paths(self) -> list[str]:
        """The shards, in order."""
    def metadata(self) -> dict[str, Any]:
        """All metadata: numbers, bool, str, list[str], numpy arrays of numbers, lists of arrays."""
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """(name, type, shape with the contiguous dimension last, bytes) of each tensor, in file order."""
    def read_f32(self, name: str) -> NDArray[np.float32]:
        """One tensor decoded to f32, in its shape."""

@final
class Vindex:
    """An open weights file of a .vindex folder; `table_json` is the tensor table of its index.

    Raises ModelError when the file cannot be read or does not fit its table.
    """

    def __new__(cls, path: str | os.PathLike[str], table_json: str) -> Vindex: ...
    def verify_against(self, gguf: Gguf, tensor_names: dict[str, str]) -> None:
        """Compares every tensor with its source; raises ModelError naming the first that differs."""

@final
class Sequence:
    """The K/V cache of one token sequence."""

    def __len__(self) -> int:
        """Tokens held."""
    def fork(self) -> Sequence:
        """A sequence with the same content; pages are shared until one of the two writes."""
    def truncate(self, length: int) -> int:
        """Forgets tokens from `length` on and returns the new length.

        It is smaller than asked where a sliding window has already dropped what is needed: feed the rest again.
        """
    def snapshot(self) -> None:
        """Keeps the windows of local layers as they are now, so that truncating to this length stays cheap."""
    def to_bytes(self) -> NDArray[np.uint8]:
        """The content, for `Engine.sequence_from_bytes`; without what snapshots keep."""

@final
class Sampler:
    """Chooses a token from logits: bias, repetition penalty, top-k, top-p, min-p, temperature, draw."""

    def __new__(
        cls,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
        bias: Mapping[int, float] | None = None,
        logprobs: bool = False,
    ) -> Sampler: ...
    def observe(self, ids: Seq[int]) -> None:
        """Adds tokens to the 64 that the repetition penalty looks at; sampled tokens are added by themselves."""
    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token for one row of logits [vocab]."""
    @property
    def last_logprob(self) -> float | None:
        """Natural log of the model's own probability of the last sampled token, when `logprobs` was asked for."""

@final
class Engine:
    """A model ready to run. One forward at a time; several threads may share it.

    Weights are a packed file, or a GGUF file with its name of each of the engine's tensors: these are packed in memory.
    """

    def __new__(
        cls,
        weights: Vindex | tuple[Gguf, dict[str, str]],
        config_json: str,
        *,
        precision: str = "fast",
        threads: int | None = None,
        context: int | None = None,
    ) -> Engine: ...
    @property
    def precision(self) -> str:
        """`fast` or `reference`."""
    @property
    def threads(self) -> int:
        """Threads that a forward uses."""
    @property
    def isa(self) -> str:
        """Instruction set of the kernels in use."""
    @property
    def context(self) -> int:
        """Tokens that a sequence may hold."""
    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decoded token reads."""
    def new_sequence(self) -> Sequence:
        """An empty sequence."""
    def sequence_from_bytes(self, length: int, bytes: NDArray[np.uint8]) -> Sequence:
        """The sequence of so many tokens that gave these bytes, in an engine of the same model and precision.

        Raises InputError for bytes of something else.
        """
    def forward(self, batch: Seq[tuple[Sequence, int, int, bool]]) -> NDArray[np.float32]:
        """Feeds (sequence, position, token, want_logits) items; logits [wanted, vocab] in batch order."""
    def forward_sample(self, batch: Seq[tuple[Sequence, int, int, bool]], samplers: Seq[Sampler]) -> list[int]:
        """As forward, with one sampler for each wanted row; returns the sampled ids."""
    def close(self) -> None:
        """Frees the weights, after what runs has come to its end; whatever is asked then raises InputError."""
    def set_profiling(self, on: bool) -> None:
        """Starts (from zero) or ends the measuring of a forward's stages; it costs about 1 % of a small model."""
    def profile(self) -> dict[str, float]:
        """Seconds that forwards have spent in each stage since profiling was turned on.

        Stages: embed, norms (residual additions included), projections (of attention), attention (RoPE and K/V
        writes included), ffn, lm_head, sampling, waiting (the calling thread for workers at the end of operations),
        other. They add up to the time of the forwards.
        """
    def trace(self, batch: Seq[tuple[Sequence, int, int, bool]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """As forward, and the residual stream [layers + 1, tokens, width] after the embedding and each layer."""
    def unembed(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [n, vocab] that states [n, width] of the residual stream would give after the last layer."""

@final
class Ladder:
    """A model in a GGUF file, to be decoded on the rungs of a ladder from naive to fast."""

    def __new__(cls, gguf: Gguf, tensor_names: dict[str, str], config_json: str) -> Ladder: ...
    @staticmethod
    def rungs() -> list[str]:
        """The names of the rungs, the slowest first; each has what those before it have."""
    def climb(
        self, rung: str, prompt: Seq[int], tokens: int, seconds: float, threads: int
    ) -> tuple[list[int], float, list[float]]:
        """Continues a prompt with at most so many tokens, each the most likely one; end tokens do not end it.

        After so many seconds of decoding no more begins, but there are two at least where `tokens` allows it. Returns
        the new ids, the seconds of the prompt, with which the first comes, and those of each further one.
        """

@final
class Matrix:
    """A weight matrix, packed once from block rows [rows, row bytes], that multiplies with `threads` threads."""

    def __new__(
        cls, dtype: str, data: NDArray[np.uint8], columns: int, *, precision: str = "fast", threads: int = 1
    ) -> Matrix: ...
    @property
    def n_bytes(self) -> int:
        """Bytes that a product reads: the rows, filled up to whole panels."""
    def multiply(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The products [rows] with x [columns], or [n, rows] with x [n, columns]."""

def write_weights(
    gguf: Gguf,
    tensor_names: dict[str, str],
    path: str | os.PathLike[str],
    progress: Callable[[int, int], object] | None = None,
) -> str:
    """Packs the tensors, in the order of the dict, into a new file and syncs it to disk.

    Returns JSON {"tensors": the table, "length": bytes, "sha256": hex}. `progress` is called with the bytes written and
    those of the whole; what it raises ends the work. Raises OSError when the file exists or cannot be written.
    """

def dequantize(dtype: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decodes whole blocks of a weight type to f32 [weights]."""

def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Rows of x [n, width], each divided by its root mean square, times weight [width]."""

def gate(activation: str, gate: NDArray[np.float32], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """activation(gate) * x, all [n]; `activation` is `silu`, or `gelu` by its tanh approximation."""

def softcap(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    """cap * tanh(x / cap) [n]."""

def quantize_activations(
    x: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.uint32], NDArray[np.float32]]:
    """Quants [n] and scales [n / 32] of x [n], and the places [2] and values [2] of the elements that stay in f32."""

def default_threads() -> int:
    """Threads of an engine that is given no number: LARQL_NUM_THREADS, or the fast cores that this process may use.

    Raises InputError when the variable is no number in range.
    """

def measure_read(buffer: NDArray[np.uint8], *, threads: int, prefetch: bool) -> float:
    """Reads the whole buffer once, in equal parts by `threads` threads; seconds."""

def measure_peak(kind: str, *, threads: int) -> float:
    """Multiply-adds per second of all threads together for about a tenth of a second of work in registers.

    `kind` is `f32` (fused multiply-add) or `int8` (8-bit products summed in 16 bits, the instruction set's best).
    """
