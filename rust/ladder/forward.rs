//! A forward pass for one sequence as a reader would first write it; the rung says how it multiplies.

use super::dot::{Row, Vector, dot_dense, dot_row};
use super::{Rung, Watch};
use crate::activations::Activations;
use crate::config::{Activation, ModelConfig};
use crate::error::{Error, Result, model_error};
use crate::gguf::Gguf;
use crate::kernels::{self, Kernels, math};
use crate::matmul::{Product, Then, matmul};
use crate::ops::Rope;
use crate::quant::{DType, blocks};
use crate::team::{Crew, Team};
use crate::weights::Weight;
use rayon::prelude::*;
use std::collections::HashMap;
use std::sync::Mutex;

/// Rows of a chunk.
const CHUNK: usize = 64;

/// Who multiplies.
pub enum Hands<'a> {
    /// Threads that take rows.
    Pool(rayon::ThreadPool),
    /// A team that enters for each product.
    Regions(Mutex<Team>),
    /// A team that has entered.
    Crew(&'a Crew),
}

/// Threads for `Hands::Pool`.
///
/// # Errors
/// `Error::Internal` when the system refuses to start them.
pub fn pool(n_threads: usize) -> Result<rayon::ThreadPool> {
    let built = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build();
    built.map_err(|e| Error::Internal(format!("cannot start {n_threads} threads: {e}")))
}

/// A weight matrix [rows, cols].
struct Matrix<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    form: Form<'a>,
}

enum Form<'a> {
    /// Rows of blocks, as the file has them.
    Stored(&'a [u8]),
    /// Decoded.
    Dense(Vec<f32>),
    /// As the engine has them.
    Packed(Weight),
}

impl<'a> Matrix<'a> {
    fn row(&self, bytes: &'a [u8], i: usize) -> Row<'a> {
        let n = bytes.len() / self.rows;
        Row { dtype: self.dtype, bytes: &bytes[i * n..(i + 1) * n], cols: self.cols }
    }
}

struct Layer<'a> {
    input_layernorm: Vec<f32>,
    /// Q, K and V.
    qkv: [Matrix<'a>; 3],
    qkv_bias: Option<[Vec<f32>; 3]>,
    qk_norm: Option<[Vec<f32>; 2]>,
    o_proj: Matrix<'a>,
    post_attention_norm: Option<Vec<f32>>,
    ffn_norm: Vec<f32>,
    gate_proj: Matrix<'a>,
    up_proj: Matrix<'a>,
    down_proj: Matrix<'a>,
    post_ffn_norm: Option<Vec<f32>>,
    rope: Rope,
    window: Option<usize>,
}

/// A model on a rung.
pub struct Plain<'a> {
    rung: Rung,
    config: &'a ModelConfig,
    kernels: &'static Kernels,
    embedding: Matrix<'a>,
    layers: Vec<Layer<'a>>,
    norm: Vec<f32>,
    head: Matrix<'a>,
}

/// Keys and values of each layer, [tokens, kv_size].
pub struct Cache {
    len: usize,
    layers: Vec<[Vec<f32>; 2]>,
}

/// Finds tensors.
struct Loader<'a, 'b> {
    gguf: &'a Gguf,
    names: &'b HashMap<String, String>,
    /// Packs matrices, where they are to be packed.
    crew: Option<&'b Crew>,
}

impl<'a> Loader<'a, '_> {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix<'a>> {
        let (dtype, bytes) = self.find(name, &[rows, cols])?;
        let form = match self.crew {
            Some(crew) => Form::Packed(Weight::pack(crew, dtype, rows, cols, bytes)?),
            None => Form::Stored(bytes),
        };
        Ok(Matrix { dtype, rows, cols, form })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let (dtype, bytes) = self.find(name, &[len])?;
        let mut values = vec![0.0; len];
        blocks::decode(dtype, bytes, &mut values);
        Ok(values)
    }

    fn find(&self, name: &str, shape: &[usize]) -> Result<(DType, &'a [u8])> {
        let tensor = self.names.get(name).and_then(|name| self.gguf.tensor(name));
        let tensor = tensor.filter(|tensor| tensor.shape == shape);
        let tensor = tensor.ok_or_else(|| model_error!("the model has no tensor {name} of shape {shape:?}"))?;
        Ok((tensor.dtype, self.gguf.bytes(tensor)))
    }

    fn layer(&self, config: &ModelConfig, i: usize) -> Result<Layer<'a>> {
        let name = |suffix: &str| format!("layers.{i}.{suffix}");
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        let (q, kv, head) = (config.q_size(), config.kv_size(), config.head_dim);
        let matrix = |suffix: &str, rows, cols| self.matrix(&name(suffix), rows, cols);
        let vector = |suffix: &str, len| self.vector(&name(suffix), len);
        let vector_if = |wanted: bool, suffix: &str| if wanted { vector(suffix, hidden).map(Some) } else { Ok(None) };
        Ok(Layer {
            input_layernorm: vector("input_layernorm", hidden)?,
            qkv: [
                matrix("self_attn.q_proj", q, hidden)?,
                matrix("self_attn.k_proj", kv, hidden)?,
                matrix("self_attn.v_proj", kv, hidden)?,
            ],
            qkv_bias: match config.qkv_bias {
                true => Some([
                    vector("self_attn.q_proj.bias", q)?,
                    vector("self_attn.k_proj.bias", kv)?,
                    vector("self_attn.v_proj.bias", kv)?,
                ]),
                false => None,
            },
            qk_norm: match config.qk_norm {
                true => Some([vector("self_attn.q_norm", head)?, vector("self_attn.k_norm", head)?]),
                false => None,
            },
            o_proj: matrix("self_attn.o_proj", hidden, q)?,
            post_attention_norm: vector_if(config.post_norms, "post_attention_norm")?,
            ffn_norm: vector("ffn_norm", hidden)?,
            gate_proj: matrix("mlp.gate_proj", inter, hidden)?,
            up_proj: matrix("mlp.up_proj", inter, hidden)?,
            down_proj: matrix("mlp.down_proj", hidden, inter)?,
            post_ffn_norm: vector_if(config.post_norms, "post_ffn_norm")?,
            rope: Rope::new(&config.layers[i].rope),
            window: config.layers[i].window,
        })
    }
}

impl<'a> Plain<'a> {
    /// A model whose matrices stay as the file has them.
    pub fn stored(
        rung: Rung,
        gguf: &'a Gguf,
        names: &HashMap<String, String>,
        config: &'a ModelConfig,
    ) -> Result<Self> {
        let mut plain = Self::load(rung, gguf, names, config, None)?;
        if rung < Rung::QuantisedHead
            && let Form::Stored(bytes) = plain.head.form
        {
            let mut values = vec![0.0; plain.head.rows * plain.head.cols];
            blocks::decode(plain.head.dtype, bytes, &mut values);
            plain.head.form = Form::Dense(values);
        }
        Ok(plain)
    }

    /// A model whose matrices are packed.
    pub fn packed(
        rung: Rung,
        gguf: &'a Gguf,
        names: &HashMap<String, String>,
        config: &'a ModelConfig,
        crew: &Crew,
    ) -> Result<Self> {
        Self::load(rung, gguf, names, config, Some(crew))
    }

    fn load(
        rung: Rung,
        gguf: &'a Gguf,
        names: &HashMap<String, String>,
        config: &'a ModelConfig,
        crew: Option<&Crew>,
    ) -> Result<Self> {
        let loader = Loader { gguf, names, crew };
        let stored = Loader { crew: None, ..loader };
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let tables = kernels::available();
        let plain = Self {
            rung,
            config,
            kernels: if rung < Rung::Simd { tables[0] } else { kernels::choose()? },
            embedding: stored.matrix("embed_tokens", vocab, hidden)?,
            layers: (0..config.layers.len()).map(|i| loader.layer(config, i)).collect::<Result<_>>()?,
            norm: loader.vector("norm", hidden)?,
            head: loader.matrix(if config.tied_head { "embed_tokens" } else { "lm_head" }, vocab, hidden)?,
        };
        gguf.check()?;
        Ok(plain)
    }

    /// A cache without tokens.
    pub fn empty_cache(&self) -> Cache {
        Cache { len: 0, layers: vec![Default::default(); self.layers.len()] }
    }

    /// Feeds tokens and returns the logits after the last one.
    ///
    /// # Errors
    /// Those of `watch`, which is called after each layer.
    pub fn forward(&self, cache: &mut Cache, tokens: &[u32], hands: &Hands, watch: &mut Watch) -> Result<Vec<f32>> {
        let config = self.config;
        let hidden = config.hidden_size;
        let mut residual = vec![0.0; tokens.len() * hidden];
        for (token, row) in tokens.iter().zip(residual.chunks_mut(hidden)) {
            if let Form::Stored(bytes) = &self.embedding.form {
                blocks::decode(self.embedding.dtype, self.embedding.row(bytes, *token as usize).bytes, row);
            }
            row.iter_mut().for_each(|value| *value *= config.embedding_scale);
        }
        for (layer, kept) in self.layers.iter().zip(&mut cache.layers) {
            let update = self.attention(layer, kept, cache.len, &residual, hands)?;
            self.add(&mut residual, update, layer.post_attention_norm.as_deref());
            let update = self.feed_forward(layer, &residual, hands)?;
            self.add(&mut residual, update, layer.post_ffn_norm.as_deref());
            watch()?;
        }
        cache.len += tokens.len();
        let last = self.normed(&residual[residual.len() - hidden..], &self.norm);
        let mut logits = self.multiply(&self.head, &last, hands)?;
        if let Some(cap) = config.logit_softcap {
            (self.kernels.softcap)(&mut logits, cap);
        }
        Ok(logits)
    }

    /// The output of attention [tokens, hidden_size] before it joins the residual stream.
    fn attention(
        &self,
        layer: &Layer,
        kept: &mut [Vec<f32>; 2],
        start: usize,
        residual: &[f32],
        hands: &Hands,
    ) -> Result<Vec<f32>> {
        let config = self.config;
        let normed = self.normed(residual, &layer.input_layernorm);
        let mut qkv = Vec::new();
        for (i, matrix) in layer.qkv.iter().enumerate() {
            let mut product = self.multiply(matrix, &normed, hands)?;
            if let Some(biases) = &layer.qkv_bias {
                product.chunks_mut(matrix.rows).for_each(|row| (self.kernels.add)(row, &biases[i]));
            }
            qkv.push(product);
        }
        let mut turns = vec![0.0; 2 * layer.rope.n_pairs()];
        for (i, (width, scale)) in
            [(config.q_size(), config.query_scale), (config.kv_size(), 1.0)].into_iter().enumerate()
        {
            for (t, row) in qkv[i].chunks_mut(width).enumerate() {
                layer.rope.turns(start + t, &mut turns);
                for head in row.chunks_mut(config.head_dim) {
                    if let Some(norms) = &layer.qk_norm {
                        let raw = head.to_vec();
                        (self.kernels.rms_norm)(&raw, &norms[i], config.norm_eps, head);
                    }
                    layer.rope.apply(self.kernels, &turns, scale, head);
                }
            }
        }
        kept[0].extend_from_slice(&qkv[1]);
        kept[1].extend_from_slice(&qkv[2]);
        let mut attended = vec![0.0; qkv[0].len()];
        let head_dim = config.head_dim;
        for (i, (out, query)) in attended.chunks_mut(head_dim).zip(qkv[0].chunks(head_dim)).enumerate() {
            let (t, head) = (i / config.n_heads, i % config.n_heads);
            let kv_head = head * config.n_kv_heads / config.n_heads;
            let first = layer.window.map_or(0, |window| (start + t + 1).saturating_sub(window));
            self.attend(query, kept, kv_head, first..start + t + 1, out);
        }
        self.multiply(&layer.o_proj, &attended, hands)
    }

    /// out = softmax(query keys) values, over some positions.
    fn attend(
        &self,
        query: &[f32],
        kept: &[Vec<f32>; 2],
        kv_head: usize,
        positions: std::ops::Range<usize>,
        out: &mut [f32],
    ) {
        let (size, dim) = (self.config.kv_size(), query.len());
        let part = |i: usize, position: usize| &kept[i][position * size + kv_head * dim..][..dim];
        let dot = dot_dense(self.rung);
        let mut scores: Vec<f32> = positions.clone().map(|position| dot(query, part(0, position))).collect();
        if let Some(cap) = self.config.attention_softcap {
            (self.kernels.softcap)(&mut scores, cap);
        }
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        scores.iter_mut().for_each(|score| *score = math::exp(*score - max));
        let total: f32 = scores.iter().sum();
        for (position, score) in positions.zip(&scores) {
            let share = score / total;
            out.iter_mut().zip(part(1, position)).for_each(|(out, value)| *out += share * value);
        }
    }

    /// The output of the feed-forward block [tokens, hidden_size].
    fn feed_forward(&self, layer: &Layer, residual: &[f32], hands: &Hands) -> Result<Vec<f32>> {
        let normed = self.normed(residual, &layer.ffn_norm);
        let gate = self.multiply(&layer.gate_proj, &normed, hands)?;
        let mut up = self.multiply(&layer.up_proj, &normed, hands)?;
        match self.config.activation {
            Activation::Silu => (self.kernels.gate_silu)(&gate, &mut up),
            Activation::GeluTanh => (self.kernels.gate_gelu)(&gate, &mut up),
        }
        self.multiply(&layer.down_proj, &up, hands)
    }

    fn normed(&self, rows: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; rows.len()];
        for (row, out) in rows.chunks(weight.len()).zip(out.chunks_mut(weight.len())) {
            (self.kernels.rms_norm)(row, weight, self.config.norm_eps, out);
        }
        out
    }

    /// residual += norm(update), or just update
    fn add(&self, residual: &mut [f32], update: Vec<f32>, norm: Option<&[f32]>) {
        let update = norm.map_or_else(|| update.clone(), |weight| self.normed(&update, weight));
        (self.kernels.add)(residual, &update);
    }

    /// x [n, cols] times the matrix: [n, rows].
    fn multiply(&self, matrix: &Matrix, x: &[f32], hands: &Hands) -> Result<Vec<f32>> {
        match (&matrix.form, hands) {
            (Form::Packed(weight), Hands::Crew(crew)) => Ok(self.multiply_packed(crew, weight, x)),
            (Form::Packed(weight), Hands::Regions(team)) => {
                let mut team = team.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                team.enter(false, |crew| Ok(self.multiply_packed(crew, weight, x)))
            }
            (Form::Stored(bytes), Hands::Pool(pool)) => Ok(pool.install(|| self.multiply_stored(matrix, bytes, x))),
            (Form::Dense(values), Hands::Pool(pool)) => Ok(pool.install(|| self.multiply_dense(matrix, values, x))),
            _ => Err(Error::Internal("this form of a matrix is not for these hands".into())),
        }
    }

    fn multiply_packed(&self, crew: &Crew, weight: &Weight, x: &[f32]) -> Vec<f32> {
        let cols = weight.cols;
        let mut inputs = Activations::new(true);
        inputs.fill(crew, self.kernels, x.len() / cols, cols, |i, row| row.copy_from_slice(&x[i * cols..][..cols]));
        let mut out = Vec::new();
        matmul(crew, self.kernels, &inputs, &mut [Product { weight, then: Then::Store, out: &mut out }]);
        out
    }

    fn multiply_stored(&self, matrix: &Matrix, bytes: &[u8], x: &[f32]) -> Vec<f32> {
        let n = x.len() / matrix.cols;
        let straight = if n == 1 { self.rung >= Rung::StoredBytes } else { self.rung >= Rung::Prefill };
        if !straight {
            let mut values = vec![0.0; matrix.rows * matrix.cols];
            self.for_rows(&mut values, matrix.cols, |i, row| {
                blocks::decode(matrix.dtype, matrix.row(bytes, i).bytes, row);
            });
            return self.multiply_dense(matrix, &values, x);
        }
        let x: Vec<_> = x.chunks(matrix.cols).map(|x| Vector::new(self.rung, self.kernels, x)).collect();
        let dot = dot_row(self.rung, matrix.dtype);
        let mut out = vec![0.0; matrix.rows * n];
        self.for_rows(&mut out, n, |i, out| dot(matrix.row(bytes, i), &x, out));
        transposed(out, n)
    }

    fn multiply_dense(&self, matrix: &Matrix, values: &[f32], x: &[f32]) -> Vec<f32> {
        let (cols, n) = (matrix.cols, x.len() / matrix.cols);
        let dot = dot_dense(self.rung);
        let mut out = vec![0.0; matrix.rows * n];
        self.for_rows(&mut out, n, |i, out| {
            let row = &values[i * cols..(i + 1) * cols];
            out.iter_mut().zip(x.chunks(cols)).for_each(|(out, x)| *out = dot(row, x));
        });
        transposed(out, n)
    }

    /// Calls `f(i, row)` for each row of `out`, spread over the threads of the pool that this runs in.
    fn for_rows(&self, out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        let at_once = if self.rung >= Rung::Chunks { CHUNK } else { 1 };
        out.par_chunks_mut(width * at_once).with_max_len(1).enumerate().for_each(|(chunk, rows)| {
            for (i, row) in rows.chunks_mut(width).enumerate() {
                f(chunk * at_once + i, row);
            }
        });
    }
}

/// [rows, n] to [n, rows].
fn transposed(rows: Vec<f32>, n: usize) -> Vec<f32> {
    if n == 1 {
        return rows;
    }
    (0..n).flat_map(|i| rows.iter().skip(i).step_by(n).copied().collect::<Vec<_>>()).collect()
}
