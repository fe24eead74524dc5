//! Typed, shape-checked tensors of a model file.

use crate::config::ModelConfig;
use crate::error::{Result, input_error, model_error};
use crate::gguf::{Gguf, TensorInfo};
use crate::kernels::WeightRows;
use crate::quant::{DType, blocks};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A weight matrix [rows, cols], used as stored.
pub struct Weight {
    /// Storage type.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    store: Store,
}

/// Where a matrix lies.
enum Store {
    File(Arc<Gguf>, TensorInfo),
    Memory(Vec<u8>),
}

impl Weight {
    /// A matrix of block rows in memory.
    ///
    /// # Errors
    /// `Error::Input` when `bytes` is not `rows` whole rows of `cols` weights.
    pub fn from_bytes(dtype: DType, rows: usize, cols: usize, bytes: Vec<u8>) -> Result<Self> {
        let row_bytes = dtype.row_bytes(cols).filter(|n| *n > 0 && rows > 0);
        if row_bytes.and_then(|n| n.checked_mul(rows)) != Some(bytes.len()) {
            let (n, name) = (bytes.len(), dtype.name());
            return Err(input_error!("{n} bytes cannot hold [{rows}, {cols}] weights of type {name}"));
        }
        Ok(Self { dtype, rows, cols, store: Store::Memory(bytes) })
    }

    /// All bytes, row after row.
    pub fn bytes(&self) -> &[u8] {
        match &self.store {
            Store::File(file, info) => file.bytes(info),
            Store::Memory(bytes) => bytes,
        }
    }

    /// Some of the rows.
    pub fn rows(&self, range: Range<usize>) -> WeightRows<'_> {
        let row_bytes = self.bytes().len() / self.rows;
        WeightRows {
            dtype: self.dtype,
            cols: self.cols,
            bytes: &self.bytes()[range.start * row_bytes..range.end * row_bytes],
        }
    }
}

/// The weights of one layer; names as in Hugging Face models.
#[allow(missing_docs)]
pub struct LayerWeights {
    pub input_layernorm: Vec<f32>,
    pub q_proj: Weight,
    pub k_proj: Weight,
    pub v_proj: Weight,
    /// Q, K and V biases.
    pub qkv_bias: Option<[Vec<f32>; 3]>,
    /// Norms of Q and K heads.
    pub qk_norm: Option<[Vec<f32>; 2]>,
    pub o_proj: Weight,
    pub post_attention_norm: Option<Vec<f32>>,
    pub ffn_norm: Vec<f32>,
    pub gate_proj: Weight,
    pub up_proj: Weight,
    pub down_proj: Weight,
    pub post_ffn_norm: Option<Vec<f32>>,
}

/// All weights of a model.
pub struct Weights {
    /// [vocab_size, hidden_size]
    pub embed_tokens: Weight,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// Final norm.
    pub norm: Vec<f32>,
    /// [vocab_size, hidden_size]; None when the embedding serves as the head.
    lm_head: Option<Weight>,
}

impl Weights {
    /// Finds every tensor that `config` calls for.
    ///
    /// `names` maps the engine's tensor names to those of the file.
    ///
    /// # Errors
    /// `Error::Model` names a tensor that is missing, has another shape, or is mapped but not called for.
    pub fn load(file: &Arc<Gguf>, config: &ModelConfig, names: &HashMap<String, String>) -> Result<Self> {
        let mut loader = Loader { file, names, used: HashSet::new() };
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let weights = Self {
            embed_tokens: loader.matrix("embed_tokens", vocab, hidden)?,
            layers: (0..config.layers.len()).map(|i| loader.layer(config, i)).collect::<Result<_>>()?,
            norm: loader.vector("norm", hidden)?,
            lm_head: if config.tied_head { None } else { Some(loader.matrix("lm_head", vocab, hidden)?) },
        };
        match names.keys().find(|name| !loader.used.contains(*name)) {
            Some(name) => Err(model_error!("tensor {} ({name}) is not part of this model", names[name])),
            None => Ok(weights),
        }
    }

    /// The output projection [vocab_size, hidden_size].
    pub fn lm_head(&self) -> &Weight {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }

    /// Bytes of matrices that one decoded token reads; of the embedding it reads a row only.
    pub fn bytes_per_token(&self) -> usize {
        let layer = |l: &LayerWeights| {
            [&l.q_proj, &l.k_proj, &l.v_proj, &l.o_proj, &l.gate_proj, &l.up_proj, &l.down_proj]
                .map(|w| w.bytes().len())
                .iter()
                .sum::<usize>()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.lm_head().bytes().len()
    }
}

struct Loader<'a> {
    file: &'a Arc<Gguf>,
    names: &'a HashMap<String, String>,
    used: HashSet<String>,
}

impl<'a> Loader<'a> {
    fn layer(&mut self, config: &ModelConfig, i: usize) -> Result<LayerWeights> {
        let name = |suffix: &str| format!("layers.{i}.{suffix}");
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        let (q, kv, head) = (config.q_size(), config.kv_size(), config.head_dim);
        Ok(LayerWeights {
            input_layernorm: self.vector(&name("input_layernorm"), hidden)?,
            q_proj: self.matrix(&name("self_attn.q_proj"), q, hidden)?,
            k_proj: self.matrix(&name("self_attn.k_proj"), kv, hidden)?,
            v_proj: self.matrix(&name("self_attn.v_proj"), kv, hidden)?,
            qkv_bias: if config.qkv_bias {
                Some([
                    self.vector(&name("self_attn.q_proj.bias"), q)?,
                    self.vector(&name("self_attn.k_proj.bias"), kv)?,
                    self.vector(&name("self_attn.v_proj.bias"), kv)?,
                ])
            } else {
                None
            },
            qk_norm: if config.qk_norm {
                Some([self.vector(&name("self_attn.q_norm"), head)?, self.vector(&name("self_attn.k_norm"), head)?])
            } else {
                None
            },
            o_proj: self.matrix(&name("self_attn.o_proj"), hidden, q)?,
            post_attention_norm: self.vector_if(config.post_norms, &name("post_attention_norm"), hidden)?,
            ffn_norm: self.vector(&name("ffn_norm"), hidden)?,
            gate_proj: self.matrix(&name("mlp.gate_proj"), inter, hidden)?,
            up_proj: self.matrix(&name("mlp.up_proj"), inter, hidden)?,
            down_proj: self.matrix(&name("mlp.down_proj"), hidden, inter)?,
            post_ffn_norm: self.vector_if(config.post_norms, &name("post_ffn_norm"), hidden)?,
        })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight> {
        let info = self.find(name, &[rows, cols])?.clone();
        Ok(Weight { dtype: info.dtype, rows, cols, store: Store::File(self.file.clone(), info) })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let info = self.find(name, &[len])?;
        let mut values = vec![0.0; len];
        blocks::decode(info.dtype, self.file.bytes(info), &mut values);
        Ok(values)
    }

    fn vector_if(&mut self, wanted: bool, name: &str, len: usize) -> Result<Option<Vec<f32>>> {
        if wanted { self.vector(name, len).map(Some) } else { Ok(None) }
    }

    fn find(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorInfo> {
        let missing = || model_error!("the model has no tensor for {name}");
        let source = self.names.get(name).ok_or_else(missing)?;
        let info = self.file.tensor(source).ok_or_else(|| model_error!("the file has no tensor {source} ({name})"))?;
        if info.shape != shape {
            return Err(model_error!("tensor {source} has shape {:?}; {shape:?} is expected", info.shape));
        }
        self.used.insert(name.to_owned());
        Ok(info)
    }
}
