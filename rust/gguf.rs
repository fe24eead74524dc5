//! Reads GGUF files: metadata, the tensor table, and the mapped bytes of every tensor.
//!
//! Layout of versions 2 and 3, little-endian; a string is a u64 length and UTF-8 bytes
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>):
//! ```text
//! start     "GGUF", version u32, number of tensors u64, number of metadata entries u64
//! metadata  key string, value type u32, value; an array is element type u32, length u64, elements
//! tensors   name string, n u32, n dimensions u64 (the contiguous one first), weight type u32, data offset u64
//! padding   to a multiple of general.alignment
//! data      every tensor at its offset from here
//! ```
//! A large model may be split into shards `x-00001-of-00003.gguf`, each a GGUF file with some of the tensors; the
//! first holds the metadata.
//!
//! The file is untrusted: every number is checked before it is used, so that a broken or hostile file gives an error,
//! never a panic, and memory stays within a small multiple of the header, whose length is limited.

use crate::error::{Result, model_error};
use crate::mapped::MappedFile;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

mod header;
#[cfg(test)]
mod tests;

pub use header::{Array, Header, TensorInfo, Value, parse};
use header::{Shown, broken, unsigned, within};

/// An open model: all its shards, mapped and checked.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    paths: Vec<PathBuf>,
    files: Vec<MappedFile>,
    metadata: Vec<(String, Value)>,
    tensors: Vec<TensorInfo>,
    tensor_idx: HashMap<String, usize>,
}

impl Gguf {
    /// Opens a model, given the path of its file or of any of its shards.
    ///
    /// # Errors
    /// `Error::Model`, starting with the path, when a file cannot be read or is not a complete GGUF file of a
    /// supported kind.
    pub fn open(path: &Path) -> Result<Self> {
        let mut gguf = Self {
            version: 0,
            paths: Vec::new(),
            files: Vec::new(),
            metadata: Vec::new(),
            tensors: Vec::new(),
            tensor_idx: HashMap::new(),
        };
        let given = Shard::open(path)?;
        let Some(split) = within(path.display(), Split::of(&given.header))? else {
            gguf.add(given)?;
            return Ok(gguf);
        };
        let mut given = Some(given);
        for no in 0..split.count {
            let shard = match given.take_if(|_| no == split.no) {
                Some(shard) => shard,
                None => Shard::open_sibling(path, &split, no)?,
            };
            gguf.add(shard)?;
        }
        let found = gguf.tensors.len();
        if found as u64 != split.n_tensors {
            let (path, needed) = (path.display(), split.n_tensors);
            return Err(broken!("{path}: the shards hold {found} tensors where split.tensors.count is {needed}"));
        }
        Ok(gguf)
    }

    /// GGUF version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The shards, in order.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The metadata in file order; of a split model, the first shard's.
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.metadata
    }

    /// The tensors of all shards in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_idx.get(name).map(|&idx| &self.tensors[idx])
    }

    /// The data of a tensor, which must be one of this model's own.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.files[tensor.shard][tensor.start..][..tensor.n_bytes]
    }

    /// Whether what was read is what the files had when they were opened.
    ///
    /// # Errors
    /// `Error::Model` names the first file that has changed.
    pub fn check(&self) -> Result<()> {
        self.files.iter().try_for_each(MappedFile::check)
    }

    /// Adds the next shard. Metadata is the first shard's; what the others repeat is theirs alone.
    fn add(&mut self, Shard { path, file, header }: Shard) -> Result<()> {
        if self.files.is_empty() {
            self.version = header.version;
            self.metadata = header.metadata;
        }
        for mut tensor in header.tensors {
            tensor.shard = self.files.len();
            if self.tensor_idx.insert(tensor.name.clone(), self.tensors.len()).is_some() {
                return Err(broken!("{}: another shard also has a tensor {}", path.display(), Shown(&tensor.name)));
            }
            self.tensors.push(tensor);
        }
        self.paths.push(path);
        self.files.push(file);
        Ok(())
    }
}

/// One mapped file.
struct Shard {
    path: PathBuf,
    file: MappedFile,
    header: Header,
}

impl Shard {
    fn open(path: &Path) -> Result<Self> {
        let file = MappedFile::open(path)?;
        if file.is_empty() {
            return Err(broken!("{}: the file is empty", path.display()));
        }
        let header = within(path.display(), parse(&file))?;
        Ok(Self { path: path.to_owned(), file, header })
    }

    /// Opens shard `no` of the model that the file at `path` is a part of.
    fn open_sibling(path: &Path, split: &Split, no: u64) -> Result<Self> {
        let sibling = path.with_file_name(split.sibling_name(path, no)?);
        if !sibling.exists() {
            let (path, sibling, count) = (path.display(), sibling.display(), split.count);
            return Err(model_error!("{path}: of its {count} shards {sibling} is missing: put all into one folder"));
        }
        let shard = Self::open(&sibling)?;
        match within(sibling.display(), Split::of(&shard.header))? {
            Some(found) if found.no == no && found.count == split.count => Ok(shard),
            _ => Err(model_error!(
                "{}: is not shard {} of {} as its name says: fetch it again",
                sibling.display(),
                no + 1,
                split.count
            )),
        }
    }
}

/// Which part of a split model a file is.
struct Split {
    /// This shard, counted from 0.
    no: u64,
    /// Shards of the model, at least 2.
    count: u64,
    /// Tensors in all shards.
    n_tensors: u64,
}

impl Split {
    /// None for a model of one file. A merged model has a `split.count` of 0.
    fn of(header: &Header) -> Result<Option<Self>> {
        let count = unsigned(&header.metadata, "split.count")?.unwrap_or(0);
        if count < 2 {
            return Ok(None);
        }
        let needed = |key| unsigned(&header.metadata, key)?.ok_or_else(|| broken!("metadata key {key} is missing"));
        let (no, n_tensors) = (needed("split.no")?, needed("split.tensors.count")?);
        if no >= count {
            return Err(broken!("split.no is {no} where split.count is {count}"));
        }
        Ok(Some(Self { no, count, n_tensors }))
    }

    /// The file name of shard `no`, from the path of this shard.
    fn sibling_name(&self, path: &Path, no: u64) -> Result<String> {
        let suffix = |no| format!("-{:05}-of-{:05}.gguf", no + 1, self.count);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match name.strip_suffix(&suffix(self.no)) {
            Some(stem) => Ok(format!("{stem}{}", suffix(no))),
            None => Err(model_error!(
                "{}: is one of {} shards, but its name does not end in {}: give the shards their original names",
                path.display(),
                self.count,
                suffix(self.no)
            )),
        }
    }
}
