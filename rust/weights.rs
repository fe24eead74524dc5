//! Typed, shape-checked tensors of a model file.

use crate::config::ModelConfig;
use crate::error::{Result, input_error, model_error};
use crate::gguf::Gguf;
use crate::kernels::Panels;
use crate::memory::Memory;
use crate::pack::{PANEL, pack_panel, unpack_row};
use crate::quant::{DType, blocks};
use crate::team::Crew;
use crate::vindex::Vindex;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A weight matrix [rows, cols], packed.
pub struct Weight {
    /// Storage type.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    place: Place,
}

/// Where a matrix lies.
enum Place {
    Memory(Memory),
    Mapped(Arc<Vindex>, Range<usize>),
}

impl Weight {
    /// Packs block rows.
    ///
    /// # Errors
    /// `Error::Input` when `bytes` is not `rows` whole rows of `cols` weights.
    pub fn pack(crew: &Crew, dtype: DType, rows: usize, cols: usize, bytes: &[u8]) -> Result<Self> {
        let row_bytes = dtype.row_bytes(cols).filter(|n| *n > 0 && rows > 0);
        let Some(row_bytes) = row_bytes.filter(|n| n.checked_mul(rows) == Some(bytes.len())) else {
            let (n, name) = (bytes.len(), dtype.name());
            return Err(input_error!("{n} bytes cannot hold [{rows}, {cols}] weights of type {name}"));
        };
        let panel_bytes = PANEL * row_bytes;
        let mut panels = Memory::zeroed(rows.div_ceil(PANEL) * panel_bytes)?;
        crew.for_rows(&mut panels, panel_bytes, |i, panel| {
            let start = i * panel_bytes;
            pack_panel(dtype, row_bytes, &bytes[start..bytes.len().min(start + panel_bytes)], panel);
        });
        Ok(Self { dtype, rows, cols, place: Place::Memory(panels) })
    }

    /// All panels.
    fn bytes(&self) -> &[u8] {
        match &self.place {
            Place::Memory(bytes) => bytes,
            Place::Mapped(file, range) => file.bytes(range.clone()),
        }
    }

    /// Bytes of the matrix, rows that fill the last panel up included.
    pub fn n_bytes(&self) -> usize {
        self.bytes().len()
    }

    /// The panels of a range; panel i begins with row PANEL * i.
    pub fn panels(&self, range: Range<usize>) -> Panels<'_> {
        let panel_bytes = self.n_bytes() / self.rows.div_ceil(PANEL);
        let bytes = &self.bytes()[range.start * panel_bytes..range.end * panel_bytes];
        Panels { dtype: self.dtype, cols: self.cols, bytes }
    }

    /// Decodes one row to f32, [cols].
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let panel = self.panels(row / PANEL..row / PANEL + 1);
        let mut blocks = vec![0; panel.bytes.len() / PANEL];
        unpack_row(self.dtype, panel.bytes, row % PANEL, &mut blocks);
        blocks::decode(self.dtype, &blocks, out);
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
    /// The file that matrices lie in.
    file: Option<Arc<Vindex>>,
}

impl Weights {
    /// Finds every tensor that `config` calls for.
    ///
    /// # Errors
    /// `Error::Model` names a tensor that is missing, has another shape, or is there but not called for.
    pub fn load(crew: &Crew, source: &Source, config: &ModelConfig) -> Result<Self> {
        let mut loader = Loader { crew, source, used: HashSet::new() };
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let weights = Self {
            embed_tokens: loader.matrix("embed_tokens", vocab, hidden)?,
            layers: (0..config.layers.len()).map(|i| loader.layer(config, i)).collect::<Result<_>>()?,
            norm: loader.vector("norm", hidden)?,
            lm_head: if config.tied_head { None } else { Some(loader.matrix("lm_head", vocab, hidden)?) },
            file: match source {
                Source::Gguf(..) => None,
                Source::Vindex(file) => Some(file.clone()),
            },
        };
        if let Source::Gguf(file, _) = source {
            file.check()?;
        }
        match source.names().into_iter().find(|name| !loader.used.contains(*name)) {
            Some(name) => Err(model_error!("tensor {} is not part of this model", source.shown(name))),
            None => Ok(weights),
        }
    }

    /// The output projection [vocab_size, hidden_size].
    pub fn lm_head(&self) -> &Weight {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }

    /// Whether what was read is what the weights were when they were opened.
    ///
    /// # Errors
    /// `Error::Model` when the file that they lie in has changed.
    pub fn check(&self) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.check())
    }

    /// Bytes of matrices that one decoded token reads; of the embedding it reads a row only.
    pub fn bytes_per_token(&self) -> usize {
        let layer = |l: &LayerWeights| {
            [&l.q_proj, &l.k_proj, &l.v_proj, &l.o_proj, &l.gate_proj, &l.up_proj, &l.down_proj]
                .map(Weight::n_bytes)
                .iter()
                .sum::<usize>()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.lm_head().n_bytes()
    }
}

/// Where tensors come from.
pub enum Source {
    /// A GGUF file, with the file's name of each of the engine's tensors.
    Gguf(Arc<Gguf>, HashMap<String, String>),
    /// A packed weights file, which uses the engine's names.
    Vindex(Arc<Vindex>),
}

impl Source {
    /// The engine's names of the tensors that the source offers.
    fn names(&self) -> Vec<&str> {
        match self {
            Source::Gguf(_, names) => names.keys().map(String::as_str).collect(),
            Source::Vindex(file) => file.tensors().iter().map(|tensor| tensor.name.as_str()).collect(),
        }
    }

    /// A tensor's name for messages.
    fn shown(&self, name: &str) -> String {
        match self {
            Source::Gguf(_, names) => format!("{} ({name})", names.get(name).map_or("?", String::as_str)),
            Source::Vindex(_) => name.to_owned(),
        }
    }

    /// Type and shape of a tensor.
    fn find(&self, name: &str) -> Result<(DType, &[usize])> {
        let missing = || model_error!("the file has no tensor {}", self.shown(name));
        match self {
            Source::Gguf(file, names) => {
                let source = names.get(name).ok_or_else(|| model_error!("the model has no tensor for {name}"))?;
                file.tensor(source).map(|info| (info.dtype, info.shape.as_slice())).ok_or_else(missing)
            }
            Source::Vindex(file) => {
                let tensor = file.tensor(name).ok_or_else(missing)?;
                Ok((DType::from_name(&tensor.dtype)?, &tensor.shape))
            }
        }
    }
}

struct Loader<'a> {
    crew: &'a Crew,
    source: &'a Source,
    used: HashSet<String>,
}

impl Loader<'_> {
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
        let dtype = self.find(name, &[rows, cols])?;
        match self.source {
            Source::Gguf(file, names) => {
                let info = file.tensor(&names[name]).expect("found above");
                Weight::pack(self.crew, dtype, rows, cols, file.bytes(info))
            }
            Source::Vindex(file) => {
                let tensor = file.tensor(name).expect("found above");
                let range = tensor.offset..tensor.offset + tensor.length;
                Ok(Weight { dtype, rows, cols, place: Place::Mapped(file.clone(), range) })
            }
        }
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let dtype = self.find(name, &[len])?;
        let mut values = vec![0.0; len];
        match self.source {
            Source::Gguf(file, names) => {
                blocks::decode(dtype, file.bytes(file.tensor(&names[name]).expect("found above")), &mut values);
            }
            Source::Vindex(file) => {
                let tensor = file.tensor(name).expect("found above");
                blocks::decode(dtype, file.bytes(tensor.offset..tensor.offset + tensor.length), &mut values);
            }
        }
        Ok(values)
    }

    fn vector_if(&mut self, wanted: bool, name: &str, len: usize) -> Result<Option<Vec<f32>>> {
        if wanted { self.vector(name, len).map(Some) } else { Ok(None) }
    }

    /// The type of a tensor that must have a shape.
    fn find(&mut self, name: &str, shape: &[usize]) -> Result<DType> {
        let (dtype, found) = self.source.find(name)?;
        if found != shape {
            let shown = self.source.shown(name);
            return Err(model_error!("tensor {shown} has shape {found:?}; {shape:?} is expected"));
        }
        self.used.insert(name.to_owned());
        Ok(dtype)
    }
}
