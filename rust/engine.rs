//! The engine: a model, its workers and buffers, and the one operation `forward(batch)`.

use crate::attention::query_blocks;
use crate::batch::BatchItem;
use crate::config::ModelConfig;
use crate::error::{Error, Result, input_error};
use crate::kernels::{self, Kernels};
use crate::kv_cache::{KvLayout, KvType, Sequence};
use crate::model::{Forward, Model, Scratch, Watch};
use crate::profile::{Profile, Stage};
use crate::team::{Team, thread_count};
use crate::weights::{Source, Weights};
use std::sync::Arc;

/// How numbers are represented on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Quantised weights meet int8 activations; K/V in f16.
    Fast,
    /// Weights are decoded to f32; activations and K/V are f32.
    Reference,
}

impl Precision {
    const TABLE: [(Self, &'static str); 2] = [(Self::Fast, "fast"), (Self::Reference, "reference")];

    /// The precision of a name.
    ///
    /// # Errors
    /// `Error::Input` lists the names.
    pub fn from_name(name: &str) -> Result<Self> {
        let found = Self::TABLE.iter().find(|row| row.1 == name);
        found.map(|row| row.0).ok_or_else(|| input_error!("precision is {name:?}; it must be fast or reference"))
    }

    /// The precision's name.
    pub fn name(self) -> &'static str {
        Self::TABLE.iter().find(|row| row.0 == self).expect("TABLE lists every precision").1
    }
}

/// What the engine may use.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Number formats.
    pub precision: Precision,
    /// Threads of a forward; see `team::thread_count`.
    pub threads: Option<usize>,
    /// Tokens that a sequence may hold; the model's own limit when absent.
    pub context: Option<usize>,
}

/// A model ready to run.
pub struct Engine {
    model: Model,
    kernels: &'static Kernels,
    precision: Precision,
    context: usize,
    layout: Arc<KvLayout>,
    team: Team,
    scratch: Scratch,
}

impl Engine {
    /// Checks a model's tensors against its config and starts the workers.
    ///
    /// # Errors
    /// `Error::Model` for tensors that do not fit, `Error::Input` for options out of range or a context that there is no
    /// memory for.
    pub fn new(source: &Source, config: ModelConfig, options: EngineOptions) -> Result<Self> {
        let context = options.context.unwrap_or(config.context_length);
        if context == 0 || context > config.context_length {
            let limit = config.context_length;
            return Err(input_error!("context is {context}; this model holds from 1 to {limit} tokens"));
        }
        let fast = options.precision == Precision::Fast;
        let layout = KvLayout::new(&config, if fast { KvType::F16 } else { KvType::F32 });
        if options.context.is_some() {
            check_memory(&layout, context)?;
        }
        let mut team = Team::new(thread_count(options.threads)?)?;
        let weights = team.enter(false, |crew| Weights::load(crew, source, &config))?;
        Ok(Self {
            layout: Arc::new(layout),
            model: Model::new(config, weights),
            kernels: kernels::choose()?,
            precision: options.precision,
            context,
            team,
            scratch: Scratch::new(fast),
        })
    }

    /// The model's config.
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// Number formats in use.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Threads of a forward.
    pub fn n_threads(&self) -> usize {
        self.team.n_threads()
    }

    /// Instruction set of the kernels.
    pub fn isa(&self) -> &'static str {
        self.kernels.isa
    }

    /// Tokens that a sequence may hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Bytes of weights that one decoded token reads.
    pub fn weight_bytes(&self) -> usize {
        self.model.weights.bytes_per_token()
    }

    /// How this engine's sequences store keys and values.
    pub fn kv_layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    /// Starts (from zero) or ends the measuring of stages.
    pub fn set_profiling(&mut self, on: bool) {
        self.scratch.profile = Profile::new(on);
    }

    /// Seconds that forwards have spent in each stage since profiling was turned on.
    pub fn profile(&self) -> Vec<(&'static str, f64)> {
        self.scratch.profile.seconds()
    }

    /// Feeds a batch and returns what `finish` makes of the wanted logits [wanted, vocab_size], in batch order.
    ///
    /// `watch` sees the residual stream [batch, hidden_size] after the embedding and after each layer.
    /// A forward that fails leaves every sequence as it was.
    ///
    /// # Errors
    /// `Error::Input` for a token, position or sequence that does not fit, `Error::Context` for a sequence that
    /// would grow too long, `Error::Model` when the weights have changed on disk, `Error::Internal` when a worker
    /// panicked, and those of `watch` and `finish`.
    pub fn forward<R>(
        &mut self,
        sequences: &mut [&mut Sequence],
        batch: &[BatchItem],
        watch: &mut Watch,
        finish: impl FnOnce(Vec<f32>) -> Result<R>,
    ) -> Result<R> {
        let n_new = self.check(sequences, batch)?;
        let outcome = self.run(sequences, batch, &n_new, watch, finish);
        for (sequence, n) in sequences.iter_mut().zip(&n_new) {
            if outcome.is_ok() {
                sequence.commit(*n);
            } else {
                sequence.rollback();
            }
        }
        outcome
    }

    /// Feeds a batch that was checked, without making its tokens part of the sequences.
    fn run<R>(
        &mut self,
        sequences: &mut [&mut Sequence],
        batch: &[BatchItem],
        n_new: &[usize],
        watch: &mut Watch,
        finish: impl FnOnce(Vec<f32>) -> Result<R>,
    ) -> Result<R> {
        sequences.iter_mut().zip(n_new).try_for_each(|(sequence, n)| sequence.reserve(*n))?;
        let blocks = query_blocks(batch, sequences.len());
        let Self { model, kernels, team, scratch, .. } = self;
        scratch.profile.start();
        let outcome = team.enter(scratch.profile.is_on(), |crew| {
            let forward = Forward { model, kernels, crew };
            let result = forward.run(sequences, batch, &blocks, scratch, watch).and_then(|logits| {
                model.weights.check()?;
                finish(logits)
            });
            scratch.profile.lap(Stage::Sampling, crew);
            result
        });
        self.scratch.profile.finish();
        outcome
    }

    /// The logits [n, vocab_size] that states [n, hidden_size] of the residual stream would give after the last layer.
    ///
    /// # Errors
    /// `Error::Internal` when a worker panicked, `Error::Model` when the weights have changed on disk.
    pub fn unembed(&mut self, states: &[f32]) -> Result<Vec<f32>> {
        let Self { model, kernels, team, scratch, .. } = self;
        team.enter(false, |crew| {
            let hidden = model.config.hidden_size;
            let state = |i: usize| &states[i * hidden..][..hidden];
            let logits = Forward { model, kernels, crew }.unembed(states.len() / hidden, state, scratch);
            model.weights.check()?;
            Ok(logits)
        })
    }

    /// Checks a batch and counts each sequence's new tokens.
    fn check(&self, sequences: &[&mut Sequence], batch: &[BatchItem]) -> Result<Vec<usize>> {
        if batch.is_empty() {
            return Err(input_error!("the batch is empty; give at least one token"));
        }
        if sequences.iter().any(|sequence| !sequence.has_layout(&self.layout)) {
            return Err(input_error!("a sequence belongs to another model; make one with this model's new_sequence"));
        }
        let mut n_new = vec![0; sequences.len()];
        for item in batch {
            let next = sequences[item.sequence].len() + n_new[item.sequence];
            if item.position != next {
                return Err(input_error!("position {} does not continue a sequence of {next} tokens", item.position));
            }
            let vocab = self.model.config.vocab_size;
            if item.token as usize >= vocab {
                return Err(input_error!("token id {} is out of range; the vocabulary has {vocab}", item.token));
            }
            n_new[item.sequence] += 1;
        }
        let longest = sequences.iter().zip(&n_new).map(|(s, n)| s.len() + n).max().unwrap_or(0);
        if longest > self.context {
            return Err(Error::Context { needed: longest, limit: self.context });
        }
        Ok(n_new)
    }
}

/// Whether there is memory for a sequence that fills the context; what is asked for here is given back.
fn check_memory(layout: &KvLayout, context: usize) -> Result<()> {
    let bytes = layout.bytes(context);
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| {
        let gigabytes = bytes as f64 / 1e9;
        input_error!("a context of {context} tokens takes {gigabytes:.1} GB, which cannot be had: choose a smaller one")
    })
}
