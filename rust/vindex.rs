//! The weights file of a .vindex folder: packed tensors, one after the other, mapped and used in place.
//!
//! `weights.bin` is nothing but the tensors, each on a boundary of ALIGNMENT bytes; what and where they are stands in
//! the tensor table, a JSON list that the folder's `index.json` holds. Matrices are packed as `pack` describes,
//! vectors are plain f32. The folder around it is Python's (`larql.vindex`).

use crate::error::{Error, Result, model_error};
use crate::gguf::Gguf;
use crate::mapped::MappedFile;
use crate::pack::{PANEL, pack_panel, packed_len};
use crate::quant::{DType, blocks};
use crate::team::Crew;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

/// Every tensor begins on a multiple of this, bytes: a cache line.
const ALIGNMENT: usize = 64;
/// Bytes that are packed before they are written, about: large writes let the page cache use huge pages.
const SLAB: usize = 16 << 20;

/// One row of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedTensor {
    /// The engine's name.
    pub name: String,
    /// Storage type.
    #[serde(rename = "type")]
    pub dtype: String,
    /// [rows, cols], or [len] of a vector, which is F32.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub offset: usize,
    /// Bytes.
    pub length: usize,
}

impl PackedTensor {
    /// Bytes that the type and shape need, or None when they make no sense.
    fn needed(&self) -> Option<usize> {
        let dtype = DType::from_name(&self.dtype).ok()?;
        match *self.shape {
            [len] if dtype == DType::F32 && len > 0 => len.checked_mul(4),
            [rows, cols] if rows > 0 && cols > 0 => packed_len(dtype, rows, cols),
            _ => None,
        }
    }
}

/// An open weights file.
#[derive(Debug)]
pub struct Vindex {
    file: MappedFile,
    tensors: Vec<PackedTensor>,
}

impl Vindex {
    /// Maps the file at `path`, which holds the tensors of `table` (JSON).
    ///
    /// # Errors
    /// `Error::Model` when the file cannot be read, or the table is malformed or does not fit the file.
    pub fn open(path: &Path, table: &str) -> Result<Self> {
        let shown = path.display();
        let tensors: Vec<PackedTensor> =
            serde_json::from_str(table).map_err(|e| model_error!("{shown}: its tensor table is malformed: {e}"))?;
        let file = MappedFile::open(path)?;
        let (mut end, mut names) = (0, HashSet::new());
        for tensor in &tensors {
            let PackedTensor { name, offset, length, .. } = tensor;
            let tensor_end = offset.checked_add(*length);
            if tensor.needed() != Some(*length) || !offset.is_multiple_of(ALIGNMENT) || *offset < end {
                return Err(model_error!("{shown}: the table's entry for tensor {name} makes no sense"));
            }
            let Some(tensor_end) = tensor_end.filter(|end| *end <= file.len()) else {
                let n = file.len();
                return Err(model_error!("{shown}: tensor {name} ends past the file's {n} bytes: convert it again"));
            };
            if !names.insert(name) {
                return Err(model_error!("{shown}: the table has tensor {name} twice"));
            }
            end = tensor_end;
        }
        Ok(Self { file, tensors })
    }

    /// The tensor table.
    pub fn tensors(&self) -> &[PackedTensor] {
        &self.tensors
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<&PackedTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Some bytes of the file: those of a tensor of the table.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.file[range]
    }

    /// Whether what was read is what the file had when it was opened.
    ///
    /// # Errors
    /// `Error::Model` when the file has changed.
    pub fn check(&self) -> Result<()> {
        self.file.check()
    }

    /// Compares every tensor with its source, `names` being (the engine's name, the source's name).
    ///
    /// # Errors
    /// `Error::Model` names the first tensor that differs, or is missing on either side.
    pub fn verify_against(&self, crew: &Crew, gguf: &Gguf, names: &[(String, String)]) -> Result<()> {
        let mut tensors = self.tensors.iter();
        for (name, source) in names {
            let mut same = tensors.next().is_some_and(|tensor| tensor.name == *name);
            pack_tensor(crew, gguf, name, source, &mut |tensor, done, piece| {
                let mine = self.tensor(name).filter(|t| t.dtype == tensor.dtype && t.shape == tensor.shape);
                same &= mine.is_some_and(|t| self.bytes(t.offset + done..t.offset + done + piece.len()) == piece);
                Ok(())
            })?;
            if !same {
                return Err(model_error!("tensor {name} is not what the source has as {source}: convert it again"));
            }
        }
        match tensors.next() {
            Some(tensor) => Err(model_error!("tensor {} does not come from the source: convert it again", tensor.name)),
            None => Ok(()),
        }
    }
}

/// What `write_weights` wrote.
#[derive(Debug, Serialize)]
pub struct Written {
    /// The tensor table.
    pub tensors: Vec<PackedTensor>,
    /// Bytes of the file.
    pub length: usize,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
}

/// Packs tensors of a GGUF file into a new weights file at `path`, and syncs it to disk.
///
/// `names` are (the engine's name, the source's name) in the order in which they are written. `progress` is told the
/// bytes written so far and those of the whole; its error ends the work.
///
/// # Errors
/// `Error::Write` when the file exists or cannot be written, `Error::Model` when a tensor is missing; those of
/// `progress`.
pub fn write_weights(
    crew: &Crew,
    gguf: &Gguf,
    names: &[(String, String)],
    path: &Path,
    progress: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<Written> {
    let total = names.iter().filter_map(|(_, source)| gguf.tensor(source)).map(|info| gguf.bytes(info).len()).sum();
    let mut out = Output::create(path)?;
    let mut tensors = Vec::new();
    for (name, source) in names {
        out.write(&[0; ALIGNMENT][..out.length.next_multiple_of(ALIGNMENT) - out.length])?;
        let offset = out.length;
        let tensor = pack_tensor(crew, gguf, name, source, &mut |_, _, piece| {
            out.write(piece)?;
            progress(out.length.min(total), total)
        })?;
        tensors.push(PackedTensor { offset, ..tensor });
    }
    gguf.check()?;
    out.finish(tensors)
}

/// A file that is hashed as it is written.
struct Output {
    file: File,
    hash: Sha256,
    length: usize,
}

impl Output {
    fn create(path: &Path) -> Result<Self> {
        let file = File::create_new(path).map_err(Error::Write)?;
        Ok(Self { file, hash: Sha256::new(), length: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.length += bytes.len();
        self.file.write_all(bytes).map_err(Error::Write)
    }

    fn finish(self, tensors: Vec<PackedTensor>) -> Result<Written> {
        self.file.sync_all().map_err(Error::Write)?;
        let sha256 = self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Written { tensors, length: self.length, sha256 })
    }
}

/// Takes a piece of a packed tensor: its row of the table (offset 0), the bytes that came before, the piece.
type Take<'a> = dyn FnMut(&PackedTensor, usize, &[u8]) -> Result<()> + 'a;

/// Packs one tensor of a GGUF file and gives it to `take` piece by piece; returns its row of the table.
fn pack_tensor(crew: &Crew, gguf: &Gguf, name: &str, source: &str, take: &mut Take) -> Result<PackedTensor> {
    let info = gguf.tensor(source).ok_or_else(|| model_error!("the file has no tensor {source} ({name})"))?;
    let entry = |dtype: DType| PackedTensor {
        name: name.to_owned(),
        dtype: dtype.name().to_owned(),
        shape: info.shape.clone(),
        offset: 0,
        length: 0,
    };
    let bytes = gguf.bytes(info);
    let tensor = entry(if info.shape.len() == 1 { DType::F32 } else { info.dtype });
    let Some(length) = tensor.needed() else {
        return Err(model_error!(
            "tensor {source} has shape {:?}; only vectors and matrices can be packed",
            info.shape
        ));
    };
    let tensor = PackedTensor { length, ..tensor };
    if let [len] = *info.shape {
        let mut values = vec![0.0_f32; len];
        blocks::decode(info.dtype, bytes, &mut values);
        take(&tensor, 0, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())?;
        return Ok(tensor);
    }
    let row_bytes = bytes.len() / info.shape[0];
    let panel_bytes = PANEL * row_bytes;
    let slab_bytes = SLAB.div_ceil(panel_bytes) * panel_bytes;
    let mut slab = vec![0; slab_bytes.min(length)];
    for done in (0..length).step_by(slab_bytes) {
        let slab = &mut slab[..slab_bytes.min(length - done)];
        crew.for_rows(slab, panel_bytes, |i, panel| {
            let start = done + i * panel_bytes;
            pack_panel(info.dtype, row_bytes, &bytes[start..bytes.len().min(start + panel_bytes)], panel);
        });
        take(&tensor, done, slab)?;
    }
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn open(table: &str, n_bytes: usize) -> Result<Vindex> {
        let path = std::env::temp_dir().join(format!("larql-vindex-{}-{n_bytes}", std::process::id()));
        fs::write(&path, vec![0; n_bytes]).unwrap();
        let opened = Vindex::open(&path, table);
        fs::remove_file(path).unwrap();
        opened
    }

    fn row(name: &str, dtype: &str, shape: &str, offset: usize, length: usize) -> String {
        format!(r#"{{"name":"{name}","type":"{dtype}","shape":{shape},"offset":{offset},"length":{length}}}"#)
    }

    #[test]
    fn tables_must_fit_the_file() {
        let (norm, matrix) = (row("norm", "F32", "[5]", 0, 20), row("head", "Q8_0", "[3, 32]", 64, 544));
        let opened = open(&format!("[{norm},{matrix}]"), 608).unwrap();
        assert_eq!(opened.tensor("head").unwrap().offset, 64);
        assert_eq!(opened.tensors().len(), 2);
        let cases = [
            (format!("[{matrix}]"), 607, "ends past"),
            (format!("[{matrix},{norm}]"), 700, "makes no sense"),
            (format!("[{norm},{}]", row("norm", "F32", "[1]", 64, 4)), 700, "twice"),
            (format!("[{}]", row("norm", "F32", "[5]", 32, 20)), 700, "makes no sense"),
            (format!("[{}]", row("norm", "F32", "[5]", 0, 24)), 700, "makes no sense"),
            (format!("[{}]", row("norm", "F16", "[5]", 0, 10)), 700, "makes no sense"),
            (format!("[{}]", row("w", "Q8_0", "[3, 33]", 0, 544)), 700, "makes no sense"),
            (format!("[{}]", row("w", "IQ4_XS", "[3, 32]", 0, 544)), 700, "makes no sense"),
            (format!("[{}]", row("w", "F32", "[4611686018427387904, 4]", 0, 0)), 700, "makes no sense"),
            (format!("[{}]", row("w", "F32", "[5]", usize::MAX - 63, 20)), 700, "ends past"),
            (format!("[{}]", row("w", "F32", "[]", 0, 0)), 700, "makes no sense"),
            ("{}".into(), 700, "malformed"),
            (r#"[{"name":"w"}]"#.into(), 700, "malformed"),
        ];
        for (table, n_bytes, message) in cases {
            let error = open(&table, n_bytes).unwrap_err().to_string();
            assert!(error.contains(message), "{table}: {error}");
        }
        assert!(Vindex::open(Path::new("/"), "[]").is_err());
    }
}
