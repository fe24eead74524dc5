//! The part of a GGUF file before the tensor data: pure functions of bytes, no files.

use crate::error::{Result, model_error};
use crate::quant::DType;
use std::collections::HashSet;
use std::fmt;

/// What the format prescribes where `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;
/// The format asks for multiples of 8; more than a huge page (2 MiB) would only waste space.
const ALIGNMENTS: std::ops::RangeInclusive<u64> = 8..=1 << 21;
/// Levels of arrays in arrays; known files have one.
const MAX_NESTING: usize = 4;
/// As in ggml.
const MAX_DIMENSIONS: usize = 4;
/// Of metadata and tensor table, in bytes; known files have up to 7 MB (a vocabulary of 262k tokens).
const MAX_HEADER_BYTES: usize = 64 << 20;
/// Metadata entries, and tensors in one file; large models have about a hundred and a few thousand.
const MAX_TABLE_LEN: usize = 1 << 17;
/// Keys and tensor names, in bytes; the format's limit for keys.
const MAX_NAME_BYTES: usize = 65_535;
/// Items to reserve memory for before any is read; a longer list grows while it is read.
const MAX_RESERVED_ITEMS: usize = 65_536;
/// Smallest encodings: an empty string, an empty array, an entry with a u8, a tensor with one dimension.
const MIN_STRING_BYTES: usize = 8;
const MIN_ARRAY_BYTES: usize = 4 + 8;
const MIN_ENTRY_BYTES: usize = MIN_STRING_BYTES + 4 + 1;
const MIN_TENSOR_BYTES: usize = MIN_STRING_BYTES + 4 + 8 + 4 + 8;

/// An error for content that no intact file has.
macro_rules! broken {
    ($($arg:tt)*) => { model_error!("{}; the file is broken: fetch another copy", format_args!($($arg)*)) };
}
pub(super) use broken;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the format's own types
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// An array value; its elements have one type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the format's own types
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
}

/// One tensor's entry in the table.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// The file's name for it, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// How its weights are stored.
    pub dtype: DType,
    /// One to four dimensions, none of them 0, the contiguous one last.
    pub shape: Vec<usize>,
    /// Bytes of the data.
    pub n_bytes: usize,
    /// The shard's number, counted from 0.
    pub(super) shard: usize,
    /// Where the data starts in its shard, in bytes.
    pub(super) start: usize,
}

/// Everything before the data of one file.
#[derive(Debug)]
pub struct Header {
    /// GGUF version.
    pub version: u32,
    /// Metadata in file order.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in file order.
    pub tensors: Vec<TensorInfo>,
}

/// Reads and checks everything before the data, given the bytes of one whole file.
///
/// # Errors
/// `Error::Model` when this is not a GGUF file of a supported kind, or not a complete one.
pub fn parse(bytes: &[u8]) -> Result<Header> {
    let mut reader = Reader::new(bytes);
    let version = read_version(&mut reader)?;
    let n_tensors = reader.table_len("tensors", MIN_TENSOR_BYTES)?;
    let n_entries = reader.table_len("metadata entries", MIN_ENTRY_BYTES)?;
    let metadata = reader.list(n_entries, read_entry)?;
    if let Some(key) = first_repeated(metadata.iter().map(|(key, _)| key)) {
        return Err(broken!("metadata key {} appears twice", Shown(key)));
    }
    let mut tensors = reader.list(n_tensors, read_tensor)?;
    if let Some(name) = first_repeated(tensors.iter().map(|tensor| &tensor.name)) {
        return Err(broken!("tensor {} appears twice", Shown(name)));
    }
    place_tensors(&mut tensors, reader.position(), alignment(&metadata)?, bytes.len())?;
    Ok(Header { version, metadata, tensors })
}

fn read_version(reader: &mut Reader) -> Result<u32> {
    if reader.rest.starts_with(b"version https://git-lfs") {
        return Err(model_error!("is a Git LFS pointer, not the model itself: fetch it with `git lfs pull`"));
    }
    if !reader.rest.starts_with(b"GGUF") {
        let start = reader.rest[..reader.rest.len().min(4)].escape_ascii();
        return Err(model_error!(
            "is not a GGUF file: it starts with \"{start}\" instead of \"GGUF\"; give the path of a .gguf file"
        ));
    }
    reader.take(4)?;
    match reader.number::<u32>()? {
        version @ 2..=3 => Ok(version),
        1 => Err(model_error!("GGUF version 1 is not supported: fetch a newer file, of version 2 or 3")),
        swapped if (1..=3).contains(&swapped.swap_bytes()) => {
            Err(model_error!("is a big-endian GGUF file: only little-endian files are supported, fetch one of those"))
        }
        version => Err(model_error!("GGUF version {version} is not supported: fetch a file of version 2 or 3")),
    }
}

fn read_entry(reader: &mut Reader, idx: usize) -> Result<(String, Value)> {
    let key = within(format_args!("key of metadata entry {idx}"), reader.name())?;
    let value = within(format_args!("metadata key {}", Shown(&key)), reader.value())?;
    Ok((key, value))
}

/// Reads one entry of the tensor table; `start` is still relative to the data.
fn read_tensor(reader: &mut Reader, idx: usize) -> Result<TensorInfo> {
    let name = within(format_args!("name of tensor {idx}"), reader.name())?;
    within(format_args!("tensor {}", Shown(&name)), read_tensor_after_name(reader, &name))
}

fn read_tensor_after_name(reader: &mut Reader, name: &str) -> Result<TensorInfo> {
    let n_dims = reader.number::<u32>()? as usize;
    if !(1..=MAX_DIMENSIONS).contains(&n_dims) {
        return Err(broken!("has {n_dims} dimensions where 1 to {MAX_DIMENSIONS} are allowed"));
    }
    let mut dims = reader.list(n_dims, |reader, _| reader.number::<u64>())?;
    dims.reverse();
    let dtype = read_dtype(reader)?;
    let start = reader.number::<u64>()?;
    if dims.contains(&0) {
        return Err(broken!("has an empty dimension: its shape is {dims:?}"));
    }
    let too_large = || broken!("is too large for any file: its shape is {dims:?}, its data offset {start}");
    let shape: Vec<usize> =
        dims.iter().map(|&dim| usize::try_from(dim).ok()).collect::<Option<_>>().ok_or_else(too_large)?;
    let start = usize::try_from(start).map_err(|_| too_large())?;
    let [outer @ .., columns] = &shape[..] else { unreachable!("n_dims is at least 1") };
    if !columns.is_multiple_of(dtype.block_len()) {
        let (dtype, block_len) = (dtype.name(), dtype.block_len());
        return Err(broken!("has rows of {columns} weights, not a multiple of the {block_len} in a {dtype} block"));
    }
    let row_bytes = dtype.row_bytes(*columns);
    let n_bytes = outer.iter().fold(row_bytes, |bytes, &dim| bytes?.checked_mul(dim)).ok_or_else(too_large)?;
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, n_bytes, shard: 0, start })
}

fn read_dtype(reader: &mut Reader) -> Result<DType> {
    let number = reader.number::<u32>()?;
    DType::from_gguf(number).ok_or_else(|| {
        let name = unsupported_type_name(number).unwrap_or("unknown");
        model_error!("weight type {number} ({name}) is not supported; supported are {}", DType::names())
    })
}

/// Moves each `start` from relative to the data to relative to the file, and checks that every tensor lies inside the
/// file and no two overlap.
fn place_tensors(tensors: &mut [TensorInfo], header_bytes: usize, alignment: usize, file_bytes: usize) -> Result<()> {
    let data_start = header_bytes.next_multiple_of(alignment); // both are limited, so this cannot overflow
    for TensorInfo { name, start, n_bytes, .. } in tensors.iter_mut() {
        let name = Shown(name);
        if !start.is_multiple_of(alignment) {
            return Err(broken!(
                "tensor {name}: its data offset {start} is not a multiple of the alignment {alignment}"
            ));
        }
        match start.checked_add(data_start).and_then(|start| Some((start, start.checked_add(*n_bytes)?))) {
            Some((file_start, end)) if end <= file_bytes => *start = file_start,
            Some((_, end)) => {
                return Err(broken!("tensor {name}: its data ends at byte {end}, the file at byte {file_bytes}"));
            }
            None => return Err(broken!("tensor {name}: its data offset {start} lies outside of any file")),
        }
    }
    let mut by_start: Vec<&TensorInfo> = tensors.iter().collect();
    by_start.sort_unstable_by_key(|tensor| tensor.start);
    for pair in by_start.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        let (first_end, second_start) = (first.start + first.n_bytes, second.start);
        if first_end > second_start {
            let (first, second) = (Shown(&first.name), Shown(&second.name));
            return Err(broken!(
                "tensors {first} and {second} overlap: one ends at byte {first_end}, the other starts at {second_start}"
            ));
        }
    }
    Ok(())
}

fn alignment(metadata: &[(String, Value)]) -> Result<usize> {
    let alignment = unsigned(metadata, "general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || !ALIGNMENTS.contains(&alignment) {
        let (least, most) = ALIGNMENTS.into_inner();
        return Err(broken!("general.alignment is {alignment}, not a power of two from {least} to {most}"));
    }
    Ok(alignment as usize)
}

/// The value of a key that, if present, must be an integer of any type and not negative.
pub(super) fn unsigned(metadata: &[(String, Value)], key: &str) -> Result<Option<u64>> {
    let Some((_, value)) = metadata.iter().find(|entry| entry.0 == key) else { return Ok(None) };
    let number = match *value {
        Value::U8(number) => Some(number.into()),
        Value::U16(number) => Some(number.into()),
        Value::U32(number) => Some(number.into()),
        Value::U64(number) => Some(number),
        Value::I8(number) => number.try_into().ok(),
        Value::I16(number) => number.try_into().ok(),
        Value::I32(number) => number.try_into().ok(),
        Value::I64(number) => number.try_into().ok(),
        _ => None,
    };
    number.map(Some).ok_or_else(|| broken!("metadata key {key} is not an unsigned integer"))
}

/// Reads numbers, strings and lists of untrusted length from the front of `rest`.
struct Reader<'a> {
    rest: &'a [u8],
    n_bytes: usize,
    limited: bool,
}

impl<'a> Reader<'a> {
    fn new(file: &'a [u8]) -> Self {
        let n_bytes = file.len().min(MAX_HEADER_BYTES);
        Self { rest: &file[..n_bytes], n_bytes, limited: n_bytes < file.len() }
    }

    fn position(&self) -> usize {
        self.n_bytes - self.rest.len()
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(n) else {
            let (position, left, place) = (self.position(), self.rest.len(), self.place());
            return Err(broken!("needs {n} bytes from byte {position} on where {place} has {left} left"));
        };
        self.rest = rest;
        Ok(taken)
    }

    fn number<T: Number>(&mut self) -> Result<T> {
        self.take(T::N_BYTES).map(T::from_le)
    }

    fn bool(&mut self) -> Result<bool> {
        match self.number::<u8>()? {
            0 => Ok(false),
            1 => Ok(true),
            byte => Err(broken!("a bool is {byte} instead of 0 or 1")),
        }
    }

    fn string(&mut self) -> Result<String> {
        let n = self.count("string bytes", 1)?;
        let bytes = self.take(n)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|error| broken!("a string is not UTF-8: {error}"))
    }

    fn name(&mut self) -> Result<String> {
        let name = self.string()?;
        if name.len() > MAX_NAME_BYTES {
            return Err(broken!("a name has {} bytes where {MAX_NAME_BYTES} are allowed", name.len()));
        }
        Ok(name)
    }

    /// Reads a value's type and the value.
    fn value(&mut self) -> Result<Value> {
        Ok(match self.number::<u32>()? {
            0 => Value::U8(self.number()?),
            1 => Value::I8(self.number()?),
            2 => Value::U16(self.number()?),
            3 => Value::I16(self.number()?),
            4 => Value::U32(self.number()?),
            5 => Value::I32(self.number()?),
            6 => Value::F32(self.number()?),
            7 => Value::Bool(self.bool()?),
            8 => Value::String(self.string()?),
            9 => Value::Array(self.array(1)?),
            10 => Value::U64(self.number()?),
            11 => Value::I64(self.number()?),
            12 => Value::F64(self.number()?),
            number => return Err(broken!("value type {number} is unknown, 0 to 12 are known")),
        })
    }

    /// Reads the element type, the length and the elements of an array `nesting` levels deep.
    fn array(&mut self, nesting: usize) -> Result<Array> {
        if nesting > MAX_NESTING {
            return Err(broken!("arrays are nested more than {MAX_NESTING} deep"));
        }
        Ok(match self.number::<u32>()? {
            0 => Array::U8(self.numbers()?),
            1 => Array::I8(self.numbers()?),
            2 => Array::U16(self.numbers()?),
            3 => Array::I16(self.numbers()?),
            4 => Array::U32(self.numbers()?),
            5 => Array::I32(self.numbers()?),
            6 => Array::F32(self.numbers()?),
            7 => Array::Bool(self.elements(1, Self::bool)?),
            8 => Array::String(self.elements(MIN_STRING_BYTES, Self::string)?),
            9 => Array::Array(self.elements(MIN_ARRAY_BYTES, |reader| reader.array(nesting + 1))?),
            10 => Array::U64(self.numbers()?),
            11 => Array::I64(self.numbers()?),
            12 => Array::F64(self.numbers()?),
            number => return Err(broken!("array element type {number} is unknown, 0 to 12 are known")),
        })
    }

    fn numbers<T: Number>(&mut self) -> Result<Vec<T>> {
        let n = self.count("array elements", T::N_BYTES)?;
        let bytes = self.take(n * T::N_BYTES)?; // no overflow: count() saw that they fit
        Ok(bytes.chunks_exact(T::N_BYTES).map(T::from_le).collect())
    }

    fn elements<T>(&mut self, min_bytes: usize, mut read: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let n = self.count("array elements", min_bytes)?;
        self.list(n, |reader, _| read(reader))
    }

    fn table_len(&mut self, items: &str, min_bytes: usize) -> Result<usize> {
        match self.count(items, min_bytes)? {
            n if n <= MAX_TABLE_LEN => Ok(n),
            n => Err(model_error!("has {n} {items}, more than the {MAX_TABLE_LEN} that are supported")),
        }
    }

    /// Reads how many items of at least `min_bytes` follow; never more than the rest has room for.
    fn count(&mut self, items: &str, min_bytes: usize) -> Result<usize> {
        let n = self.number::<u64>()?;
        let room = self.rest.len() / min_bytes;
        match usize::try_from(n) {
            Ok(n) if n <= room => Ok(n),
            _ => Err(broken!("has {n} {items} where {} has room for {room}", self.place())),
        }
    }

    /// Reads `n` items, `n` being what `count` returned.
    fn list<T>(&mut self, n: usize, mut read: impl FnMut(&mut Self, usize) -> Result<T>) -> Result<Vec<T>> {
        let mut items = Vec::with_capacity(n.min(MAX_RESERVED_ITEMS));
        for idx in 0..n {
            items.push(read(self, idx)?);
        }
        Ok(items)
    }

    /// What ends where `rest` ends.
    fn place(&self) -> String {
        if self.limited { format!("a header of at most {MAX_HEADER_BYTES} bytes") } else { "the file".to_owned() }
    }
}

/// A number that is stored in its little-endian bytes.
trait Number {
    const N_BYTES: usize;
    fn from_le(bytes: &[u8]) -> Self;
}

macro_rules! impl_number {
    ($($t:ty)*) => { $(impl Number for $t {
        const N_BYTES: usize = size_of::<$t>();
        fn from_le(bytes: &[u8]) -> Self {
            Self::from_le_bytes(bytes.try_into().expect("the caller takes N_BYTES"))
        }
    })* };
}

impl_number!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

/// Puts the place of an error before its text.
pub(super) fn within<T>(place: impl fmt::Display, result: Result<T>) -> Result<T> {
    result.map_err(|error| model_error!("{place}: {error}"))
}

/// A name from a file as it may stand in a message: quoted, escaped, and not too long.
pub(super) struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        const MAX_CHARS: usize = 80;
        match self.0.char_indices().nth(MAX_CHARS) {
            Some((end, _)) => write!(f, "{:?}...", &self.0[..end]),
            None => write!(f, "{:?}", self.0),
        }
    }
}

fn first_repeated<'a>(mut names: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    let mut seen = HashSet::new();
    names.find(|&name| !seen.insert(name))
}

/// The names that ggml gives to the types LARQL cannot read, for messages.
pub(super) fn unsupported_type_name(number: u32) -> Option<&'static str> {
    Some(match number {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return None,
    })
}
