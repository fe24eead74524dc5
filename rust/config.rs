//! The model as data: everything the engine must know to run it, and nothing about where it came from.
//!
//! Python (`larql.config.ModelConfig`) makes this from GGUF metadata and hands it over as JSON.

use crate::error::{Result, model_error};
use serde::{Deserialize, Serialize};

/// The gate's nonlinearity in the feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// The tanh approximation of GELU (Hendrycks and Gimpel, 2016).
    GeluTanh,
}

/// Which two elements of a head RoPE turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopePairing {
    /// (2i, 2i + 1): GGUFs of the llama family.
    Adjacent,
    /// (i, i + dims / 2): Gemma and Qwen.
    Half,
}

/// Rotary position embedding (Su et al., 2021) of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeConfig {
    /// Base of the geometric series of frequencies.
    pub base: f64,
    /// Positions are divided by this (linear position interpolation).
    pub scaling_factor: f64,
    /// Divisors of the frequencies, one for each pair; absent means all 1 (Llama 3.1 has them).
    pub frequency_factors: Option<Vec<f64>>,
    /// How many leading elements of a head are turned.
    pub dims: usize,
    /// Which elements form a pair.
    pub pairing: RopePairing,
}

/// What differs between the layers of one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig {
    /// Position i sees positions i - window + 1 ..= i; absent means all up to i.
    pub window: Option<usize>,
    /// The layer's rotary embedding.
    pub rope: RopeConfig,
}

/// One decoder-only transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Elements of one head (queries, keys and values alike).
    pub head_dim: usize,
    /// Tokens that the model was trained to hold.
    pub context_length: usize,
    /// Added to the mean square in every RMSNorm.
    pub norm_eps: f32,
    /// Embedding rows are multiplied by this.
    pub embedding_scale: f32,
    /// Queries are multiplied by this before they meet the keys.
    pub query_scale: f32,
    /// The gate's nonlinearity.
    pub activation: Activation,
    /// Q, K and V projections add a bias.
    pub qkv_bias: bool,
    /// Q and K heads are normalised before RoPE.
    pub qk_norm: bool,
    /// The outputs of attention and feed-forward are normalised before they join the residual stream.
    pub post_norms: bool,
    /// Attention scores s become cap * tanh(s / cap).
    pub attention_softcap: Option<f32>,
    /// Logits l become cap * tanh(l / cap).
    pub logit_softcap: Option<f32>,
    /// The head is the embedding.
    pub tied_head: bool,
    /// The layers, first to last.
    pub layers: Vec<LayerConfig>,
}

impl ModelConfig {
    /// Reads and checks a config from JSON.
    ///
    /// # Errors
    /// `Error::Model` names the field that cannot be used.
    pub fn from_json(json: &str) -> Result<Self> {
        let config: Self = serde_json::from_str(json).map_err(|e| model_error!("model config: {e}"))?;
        config.check()?;
        Ok(config)
    }

    /// Width of all query heads together.
    pub fn q_size(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_size(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    fn check(&self) -> Result<()> {
        // A limit far above any real model keeps every product below clear of overflow.
        const MAX: usize = 1 << 24;
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("context_length", self.context_length),
            ("number of layers", self.layers.len()),
        ];
        for (name, value) in sizes {
            if value == 0 || value > MAX {
                return Err(model_error!("model config: {name} is {value}; it must be from 1 to {MAX}"));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(model_error!(
                "model config: {} query heads cannot share {} key/value heads",
                self.n_heads,
                self.n_kv_heads
            ));
        }
        if self.q_size() > MAX {
            return Err(model_error!(
                "model config: {} heads of {} elements are too wide",
                self.n_heads,
                self.head_dim
            ));
        }
        let positive = [
            ("norm_eps", Some(self.norm_eps)),
            ("embedding_scale", Some(self.embedding_scale)),
            ("query_scale", Some(self.query_scale)),
            ("attention_softcap", self.attention_softcap),
            ("logit_softcap", self.logit_softcap),
        ];
        for (name, value) in positive {
            if value.is_some_and(|v| !v.is_finite() || v <= 0.0) {
                return Err(model_error!("model config: {name} must be a positive number"));
            }
        }
        for (i, layer) in self.layers.iter().enumerate() {
            self.check_layer(layer).map_err(|what| model_error!("model config: layer {i}: {what}"))?;
        }
        Ok(())
    }

    fn check_layer(&self, layer: &LayerConfig) -> std::result::Result<(), String> {
        let rope = &layer.rope;
        if layer.window == Some(0) {
            return Err("the attention window is 0".into());
        }
        if rope.dims == 0 || !rope.dims.is_multiple_of(2) || rope.dims > self.head_dim {
            return Err(format!("{} rotary dimensions in a head of {}", rope.dims, self.head_dim));
        }
        if !(rope.base.is_finite() && rope.base > 0.0 && rope.scaling_factor.is_finite() && rope.scaling_factor > 0.0) {
            return Err(format!("RoPE base {} and scaling factor {} must be positive", rope.base, rope.scaling_factor));
        }
        if let Some(factors) = &rope.frequency_factors {
            if factors.len() != rope.dims / 2 {
                return Err(format!("{} RoPE frequency factors for {} pairs", factors.len(), rope.dims / 2));
            }
            if factors.iter().any(|f| !f.is_finite() || *f <= 0.0) {
                return Err("RoPE frequency factors must be positive".into());
            }
        }
        Ok(())
    }
}
