//! The climb: a decoder that is made fast one step at a time, each a rung that runs for real.
//!
//! Nothing of the engine depends on this. Up to `FineScales` a rung multiplies rows of blocks as a model file has them,
//! by code of this module; from `Panels` on it uses the engine's own parts, and `Engine` is the engine.

mod dot;
mod forward;
#[cfg(target_arch = "x86_64")]
mod avx2;

use crate::batch::BatchItem;
use crate::config::ModelConfig;
use crate::engine::{Engine, EngineOptions, Precision};
use crate::error::{Error, Result, input_error};
use crate::gguf::Gguf;
use crate::kernels::set_prefetch;
use crate::kv_cache::Sequence;
use crate::team::Team;
use crate::weights::Source;
use forward::{Hands, Plain};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A rung; each has what the ones before it have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// All tokens are computed again for each new one, and every weight is decoded to f32 each time.
    Naive,
    /// Keys and values are kept.
    Cache,
    /// A new token is multiplied by the stored bytes.
    StoredBytes,
    /// With vector instructions.
    Simd,
    /// The output head, in f32 so far, stays quantised, too.
    QuantisedHead,
    /// Several independent sums hide the latency of additions.
    Accumulators,
    /// Activations in int8, one scale for 256, multiplied as integers.
    Integers,
    /// A task takes a chunk of rows instead of one.
    Chunks,
    /// As many threads as the memory can feed.
    Threads,
    /// A prompt, too, is multiplied by the stored bytes.
    Prefill,
    /// One scale for 32 activations, and the two largest in f32.
    FineScales,
    /// Weights in panels of 16 rows.
    Panels,
    /// Threads stay for a whole token instead of one product.
    Team,
    /// Memory is asked for ahead of its use.
    Prefetch,
    /// Products with the same input are one operation; attention, norms and quantising are spread over the threads.
    Engine,
}

impl Rung {
    /// All rungs with their names, in order.
    pub const ALL: [(Self, &'static str); 15] = [
        (Self::Naive, "naive"),
        (Self::Cache, "cache"),
        (Self::StoredBytes, "stored-bytes"),
        (Self::Simd, "simd"),
        (Self::QuantisedHead, "quantised-head"),
        (Self::Accumulators, "accumulators"),
        (Self::Integers, "integers"),
        (Self::Chunks, "chunks"),
        (Self::Threads, "threads"),
        (Self::Prefill, "prefill"),
        (Self::FineScales, "fine-scales"),
        (Self::Panels, "panels"),
        (Self::Team, "team"),
        (Self::Prefetch, "prefetch"),
        (Self::Engine, "engine"),
    ];

    /// The rung of a name.
    ///
    /// # Errors
    /// `Error::Input` lists the names.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.iter().find(|row| row.1 == name).map(|row| row.0).ok_or_else(|| {
            input_error!("there is no rung {name:?}; the rungs are {}", Self::ALL.map(|row| row.1).join(" "))
        })
    }
}

/// A model to climb with.
pub struct Ladder {
    gguf: Arc<Gguf>,
    names: HashMap<String, String>,
    config: ModelConfig,
}

/// When a rung ends.
#[derive(Clone, Copy)]
pub struct Limits {
    /// New tokens at most.
    pub tokens: usize,
    /// No token begins later than this after the first, but the second always does.
    pub time: Duration,
}

/// What a rung did.
pub struct Climbed {
    /// New tokens, each the most likely one.
    pub ids: Vec<u32>,
    /// Time of the prompt, with which the first token comes.
    pub prompt: Duration,
    /// Time of each further token.
    pub steps: Vec<Duration>,
}

/// Feeds tokens to what has been fed and returns the logits after the last one.
type Feed<'a> = dyn FnMut(&[u32], &mut Watch) -> Result<Vec<f32>> + 'a;
/// Called between layers; an error ends the climb.
pub type Watch<'a> = dyn FnMut() -> Result<()> + 'a;

impl Ladder {
    /// A model in a GGUF file, with the file's name of each of the engine's tensors.
    pub fn new(gguf: Arc<Gguf>, names: HashMap<String, String>, config: ModelConfig) -> Self {
        Self { gguf, names, config }
    }

    /// Continues a prompt on a rung with so many threads.
    ///
    /// # Errors
    /// `Error::Input` for a prompt that is empty or does not fit, `Error::Model` for a file that does not, and those of
    /// `watch`.
    pub fn climb(
        &self,
        rung: Rung,
        prompt: &[u32],
        limits: Limits,
        n_threads: usize,
        watch: &mut Watch,
    ) -> Result<Climbed> {
        let longest = prompt.len() + limits.tokens;
        if prompt.is_empty() || longest > self.config.context_length {
            return Err(input_error!("a prompt and new tokens must be from 1 to {}", self.config.context_length));
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= self.config.vocab_size) {
            return Err(input_error!("token id {id} is out of range; the vocabulary has {}", self.config.vocab_size));
        }
        let _prefetch = Prefetch::set(rung >= Rung::Prefetch);
        match rung {
            Rung::Engine => {
                let options = EngineOptions { precision: Precision::Fast, threads: Some(n_threads), context: None };
                let source = Source::Gguf(self.gguf.clone(), self.names.clone());
                let mut engine = Engine::new(&source, self.config.clone(), options)?;
                let mut sequence = Sequence::new(engine.kv_layout().clone());
                run(prompt, limits, true, watch, &mut |tokens, watch| {
                    let (start, last) = (sequence.len(), tokens.len() - 1);
                    let item = |(i, token): (usize, &u32)| BatchItem {
                        sequence: 0,
                        position: start + i,
                        token: *token,
                        want_logits: i == last,
                    };
                    let batch: Vec<_> = tokens.iter().enumerate().map(item).collect();
                    engine.forward(&mut [&mut sequence], &batch, &mut |_| watch(), Ok)
                })
            }
            Rung::Panels | Rung::Team | Rung::Prefetch => {
                let mut team = Team::new(n_threads)?;
                let plain =
                    team.enter(false, |crew| Plain::packed(rung, &self.gguf, &self.names, &self.config, crew))?;
                if rung == Rung::Panels {
                    let mut cache = plain.empty_cache();
                    let hands = Hands::Regions(Mutex::new(team));
                    return run(prompt, limits, true, watch, &mut |tokens, watch| {
                        plain.forward(&mut cache, tokens, &hands, watch)
                    });
                }
                let mut cache = plain.empty_cache();
                run(prompt, limits, true, watch, &mut |tokens, watch| {
                    // The watcher belongs to this thread, which is the one that enters.
                    team.enter(false, |crew| plain.forward(&mut cache, tokens, &Hands::Crew(crew), watch))
                })
            }
            _ => {
                let plain = Plain::stored(rung, &self.gguf, &self.names, &self.config)?;
                let hands = Hands::Pool(forward::pool(n_threads)?);
                let mut cache = plain.empty_cache();
                let keeps = rung >= Rung::Cache;
                run(prompt, limits, keeps, watch, &mut |tokens, watch| {
                    if !keeps {
                        cache = plain.empty_cache();
                    }
                    plain.forward(&mut cache, tokens, &hands, watch)
                })
            }
        }
    }
}

/// The loop over tokens. Where nothing is kept, `feed` gets all tokens each time.
fn run(prompt: &[u32], limits: Limits, keeps: bool, watch: &mut Watch, feed: &mut Feed) -> Result<Climbed> {
    let mut all = prompt.to_vec();
    let begin = Instant::now();
    let mut logits = feed(prompt, watch)?;
    let mut climbed = Climbed { ids: Vec::new(), prompt: begin.elapsed(), steps: Vec::new() };
    let begin = Instant::now();
    loop {
        let token = most_likely(&logits)?;
        all.push(token);
        climbed.ids.push(token);
        let n = climbed.ids.len();
        if n >= limits.tokens || n > 1 && begin.elapsed() > limits.time {
            return Ok(climbed);
        }
        let start = Instant::now();
        logits = feed(if keeps { &all[all.len() - 1..] } else { &all }, watch)?;
        climbed.steps.push(start.elapsed());
    }
}

fn most_likely(logits: &[f32]) -> Result<u32> {
    let best = logits.iter().enumerate().reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map(|(i, _)| i as u32).ok_or_else(|| Error::Internal("no logits".into()))
}

/// Turns prefetching off, and on again in the end.
struct Prefetch;

impl Prefetch {
    fn set(on: bool) -> Self {
        set_prefetch(on);
        Self
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        set_prefetch(true);
    }
}
