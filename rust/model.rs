//! The forward pass: one batch through all layers, readable straight down.

use crate::activations::Activations;
use crate::attention::{AttentionShape, QueryBlock, attention};
use crate::batch::BatchItem;
use crate::config::{Activation, ModelConfig};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::kv_cache::Sequence;
use crate::matmul::{Product, Then, matmul};
use crate::ops::Rope;
use crate::profile::{Profile, Stage};
use crate::team::Crew;
use crate::weights::Weights;

/// A model at rest: what every forward reads and none changes.
pub struct Model {
    /// Sizes and rules.
    pub config: ModelConfig,
    /// Tensors.
    pub weights: Weights,
    /// The distinct rotations; layers refer to them by `layer_ropes`.
    ropes: Vec<Rope>,
    layer_ropes: Vec<usize>,
}

impl Model {
    /// A model of checked parts.
    pub fn new(config: ModelConfig, weights: Weights) -> Self {
        let mut ropes: Vec<Rope> = Vec::new();
        let mut layer_ropes = Vec::new();
        for layer in &config.layers {
            let known = ropes.iter().position(|rope| rope.is(&layer.rope));
            layer_ropes.push(known.unwrap_or_else(|| {
                ropes.push(Rope::new(&layer.rope));
                ropes.len() - 1
            }));
        }
        Self { config, weights, ropes, layer_ropes }
    }
}

/// Buffers of a forward, grown to the largest batch so far and reused. Shapes for a batch of n tokens.
pub struct Scratch {
    /// Residual stream [n, hidden_size].
    residual: Vec<f32>,
    /// Normalised residual stream [n, hidden_size].
    normed: Activations,
    /// [n, n_heads, head_dim]
    q: Vec<f32>,
    /// [n, n_kv_heads, head_dim]
    k: Vec<f32>,
    /// [n, n_kv_heads, head_dim]
    v: Vec<f32>,
    /// Attention before its output projection [n, n_heads, head_dim].
    attended: Activations,
    /// Feed-forward before its down projection [n, intermediate_size].
    gated: Activations,
    /// Output of attention or feed-forward [n, hidden_size].
    update: Vec<f32>,
    /// Rotations of each distinct RoPE [ropes][n, 2, pairs].
    turns: Vec<Vec<f32>>,
    /// Where the time goes.
    pub profile: Profile,
}

impl Scratch {
    /// Empty buffers; `int8` multiplies quantised weights in integers.
    pub fn new(int8: bool) -> Self {
        Self {
            residual: Vec::new(),
            normed: Activations::new(int8),
            q: Vec::new(),
            k: Vec::new(),
            v: Vec::new(),
            attended: Activations::new(int8),
            gated: Activations::new(int8),
            update: Vec::new(),
            turns: Vec::new(),
            profile: Profile::default(),
        }
    }
}

/// One forward's surroundings.
pub struct Forward<'a> {
    /// The model.
    pub model: &'a Model,
    /// Inner loops.
    pub kernels: &'a Kernels,
    /// Workers.
    pub crew: &'a Crew,
}

/// Called with the residual stream [batch, hidden_size] after the embedding and after each layer; an error ends the
/// forward.
pub type Watch<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

impl Forward<'_> {
    /// Runs the batch and returns the logits of the rows that want them [wanted, vocab_size], in batch order.
    ///
    /// Keys and values are written to the sequences but not committed.
    ///
    /// # Errors
    /// Those of `watch`.
    pub fn run(
        &self,
        sequences: &mut [&mut Sequence],
        batch: &[BatchItem],
        blocks: &[QueryBlock],
        scratch: &mut Scratch,
        watch: &mut Watch,
    ) -> Result<Vec<f32>> {
        self.embed(batch, scratch);
        scratch.profile.lap(Stage::Embed, self.crew);
        self.compute_turns(batch, scratch);
        scratch.profile.lap(Stage::Attention, self.crew);
        watch(&scratch.residual)?;
        for layer in 0..self.model.config.layers.len() {
            self.attention_block(layer, sequences, batch, blocks, scratch);
            self.feed_forward_block(layer, scratch);
            watch(&scratch.residual)?;
        }
        Ok(self.head(batch, scratch))
    }

    /// residual = embedding rows * embedding_scale
    fn embed(&self, batch: &[BatchItem], s: &mut Scratch) {
        let Model { config, weights, .. } = self.model;
        let hidden = config.hidden_size;
        s.residual.resize(batch.len() * hidden, 0.0);
        self.crew.for_rows(&mut s.residual, hidden, |i, row| {
            weights.embed_tokens.read_row(batch[i].token as usize, row);
            row.iter_mut().for_each(|v| *v *= config.embedding_scale);
        });
    }

    fn compute_turns(&self, batch: &[BatchItem], s: &mut Scratch) {
        s.turns.resize(self.model.ropes.len(), Vec::new());
        for (rope, turns) in self.model.ropes.iter().zip(&mut s.turns) {
            let width = 2 * rope.n_pairs();
            turns.resize(batch.len() * width, 0.0);
            self.crew.for_rows(turns, width, |i, row| rope.turns(batch[i].position, row));
        }
    }

    /// residual += post_norm(attention(norm(residual)) times o_proj)
    fn attention_block(
        &self,
        layer: usize,
        sequences: &mut [&mut Sequence],
        batch: &[BatchItem],
        blocks: &[QueryBlock],
        s: &mut Scratch,
    ) {
        let config = &self.model.config;
        let w = &self.model.weights.layers[layer];
        self.normed_input(&w.input_layernorm, s);

        let bias = |i: usize| w.qkv_bias.as_ref().map_or(Then::Store, |biases| Then::Add(&biases[i]));
        let mut products = [
            Product { weight: &w.q_proj, then: bias(0), out: &mut s.q },
            Product { weight: &w.k_proj, then: bias(1), out: &mut s.k },
            Product { weight: &w.v_proj, then: bias(2), out: &mut s.v },
        ];
        matmul(self.crew, self.kernels, &s.normed, &mut products);
        s.profile.lap(Stage::Projections, self.crew);

        let rope_idx = self.model.layer_ropes[layer];
        let norm = |i: usize| w.qk_norm.as_ref().map(|norms| norms[i].as_slice());
        self.turn_heads(rope_idx, norm(0), config.query_scale, config.q_size(), &mut s.q, &s.turns[rope_idx]);
        self.turn_heads(rope_idx, norm(1), 1.0, config.kv_size(), &mut s.k, &s.turns[rope_idx]);

        let kv_rows = s.k.chunks_exact(config.kv_size()).zip(s.v.chunks_exact(config.kv_size()));
        for (item, (k, v)) in batch.iter().zip(kv_rows) {
            sequences[item.sequence].write(layer, item.position, k, v);
        }

        let shape = AttentionShape {
            layer,
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            window: config.layers[layer].window,
            softcap: config.attention_softcap,
        };
        let attended = s.attended.values_mut(config.q_size());
        attended.resize(s.q.len(), 0.0);
        attention(self.crew, self.kernels, shape, sequences, blocks, &s.q, attended);
        s.attended.quantise(self.crew, self.kernels);
        s.profile.lap(Stage::Attention, self.crew);
        let mut products = [Product { weight: &w.o_proj, then: Then::Store, out: &mut s.update }];
        matmul(self.crew, self.kernels, &s.attended, &mut products);
        s.profile.lap(Stage::Projections, self.crew);
        self.add_update(w.post_attention_norm.as_deref(), s);
    }

    /// residual += post_norm((act(norm(residual) times gate) * (norm(residual) times up)) times down)
    fn feed_forward_block(&self, layer: usize, s: &mut Scratch) {
        let config = &self.model.config;
        let w = &self.model.weights.layers[layer];
        self.normed_input(&w.ffn_norm, s);

        let apply = match config.activation {
            Activation::Silu => self.kernels.gate_silu,
            Activation::GeluTanh => self.kernels.gate_gelu,
        };
        let then = Then::Gate { weight: &w.gate_proj, apply };
        let out = s.gated.values_mut(config.intermediate_size);
        matmul(self.crew, self.kernels, &s.normed, &mut [Product { weight: &w.up_proj, then, out }]);
        s.gated.quantise(self.crew, self.kernels);
        let mut products = [Product { weight: &w.down_proj, then: Then::Store, out: &mut s.update }];
        matmul(self.crew, self.kernels, &s.gated, &mut products);
        s.profile.lap(Stage::Ffn, self.crew);
        self.add_update(w.post_ffn_norm.as_deref(), s);
    }

    /// normed = norm(residual)
    fn normed_input(&self, weight: &[f32], s: &mut Scratch) {
        let hidden = self.model.config.hidden_size;
        let residual = &s.residual;
        s.normed.fill(self.crew, self.kernels, residual.len() / hidden, hidden, |i, row| {
            self.rms_norm(&residual[i * hidden..][..hidden], weight, row);
        });
        s.profile.lap(Stage::Norms, self.crew);
    }

    /// residual += norm(update), or just update
    fn add_update(&self, norm: Option<&[f32]>, s: &mut Scratch) {
        let hidden = self.model.config.hidden_size;
        let update = &s.update;
        self.crew.for_rows(&mut s.residual, hidden, |i, row| {
            let update = &update[i * hidden..][..hidden];
            let Some(weight) = norm else {
                return (self.kernels.add)(row, update);
            };
            let mut normed = vec![0.0; hidden];
            self.rms_norm(update, weight, &mut normed);
            (self.kernels.add)(row, &normed);
        });
        s.profile.lap(Stage::Norms, self.crew);
    }

    /// Normalises (if the model does), turns and scales every head of rows of `width` elements.
    fn turn_heads(
        &self,
        rope_idx: usize,
        norm: Option<&[f32]>,
        scale: f32,
        width: usize,
        x: &mut [f32],
        turns: &[f32],
    ) {
        let rope = &self.model.ropes[rope_idx];
        let turns_of = |i: usize| &turns[i * 2 * rope.n_pairs()..][..2 * rope.n_pairs()];
        self.crew.for_rows(x, width, |i, row| {
            for head in row.chunks_exact_mut(self.model.config.head_dim) {
                if let Some(weight) = norm {
                    let raw = head.to_vec();
                    self.rms_norm(&raw, weight, head);
                }
                rope.apply(self.kernels, turns_of(i), scale, head);
            }
        });
    }

    fn rms_norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        (self.kernels.rms_norm)(x, weight, self.model.config.norm_eps, out);
    }

    /// Logits of the rows that want them.
    fn head(&self, batch: &[BatchItem], s: &mut Scratch) -> Vec<f32> {
        let hidden = self.model.config.hidden_size;
        let wanted: Vec<usize> = (0..batch.len()).filter(|i| batch[*i].want_logits).collect();
        let residual = std::mem::take(&mut s.residual);
        let logits = self.unembed(wanted.len(), |i| &residual[wanted[i] * hidden..][..hidden], s);
        s.residual = residual;
        logits
    }

    /// Logits [n, vocab_size] of `n` states of the residual stream [hidden_size].
    pub fn unembed<'a>(&self, n: usize, state: impl Fn(usize) -> &'a [f32] + Sync, s: &mut Scratch) -> Vec<f32> {
        let Model { config, weights, .. } = self.model;
        let mut logits = Vec::new();
        if n == 0 {
            return logits;
        }
        s.normed.fill(self.crew, self.kernels, n, config.hidden_size, |i, row| {
            self.rms_norm(state(i), &weights.norm, row);
        });
        s.profile.lap(Stage::Norms, self.crew);
        let mut products = [Product { weight: weights.lm_head(), then: Then::Store, out: &mut logits }];
        matmul(self.crew, self.kernels, &s.normed, &mut products);
        s.profile.lap(Stage::LmHead, self.crew);
        if let Some(cap) = config.logit_softcap {
            self.crew.for_rows(&mut logits, config.vocab_size, |_, row| (self.kernels.softcap)(row, cap));
        }
        logits
    }
}
