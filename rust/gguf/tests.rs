//! Files are built byte by byte, so that every field can be wrong on its own.

use super::*;
use crate::quant::DType;
use std::fs;

const F32: u32 = 0;
const Q4_0: u32 = 2;
const U16: u32 = 2;
const U32: u32 = 4;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// The fields of a file to be; `bytes` puts them together.
struct File {
    version: u32,
    metadata: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    alignment: usize,
    n_data_bytes: usize,
}

impl Default for File {
    fn default() -> Self {
        Self { version: 3, metadata: Vec::new(), tensors: Vec::new(), alignment: 32, n_data_bytes: 0 }
    }
}

impl File {
    /// Adds a metadata entry, `value` being everything after the type.
    fn entry(mut self, key: &str, value_type: u32, value: &[u8]) -> Self {
        self.metadata.push([&string(key), &value_type.to_le_bytes()[..], value].concat());
        self
    }

    /// Adds a table entry, `dims` with the contiguous one first.
    fn tensor(mut self, name: &str, dims: &[u64], weight_type: u32, offset: u64) -> Self {
        let n_dims = dims.len() as u32;
        let dims: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let (n_dims, weight_type, offset) = (n_dims.to_le_bytes(), weight_type.to_le_bytes(), offset.to_le_bytes());
        self.tensors.push([&string(name), &n_dims[..], &dims, &weight_type, &offset].concat());
        self
    }

    fn data(mut self, n_bytes: usize) -> Self {
        self.n_data_bytes = n_bytes;
        self
    }

    fn split(self, no: u16, count: u16, n_tensors: i32) -> Self {
        self.entry("split.no", U16, &no.to_le_bytes()).entry("split.count", U16, &count.to_le_bytes()).entry(
            "split.tensors.count",
            5,
            &n_tensors.to_le_bytes(),
        )
    }

    /// The data counts up from byte to byte.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        bytes.extend(self.metadata.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend((0..self.n_data_bytes).map(|byte| byte as u8));
        bytes
    }

    fn parse(&self) -> Result<Header> {
        parse(&self.bytes())
    }

    #[track_caller]
    fn fails_with(&self, expected: &str) {
        assert_fails(self.parse(), expected);
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn array(element_type: u32, n: u64, elements: &[u8]) -> Vec<u8> {
    [&element_type.to_le_bytes()[..], &n.to_le_bytes(), elements].concat()
}

#[track_caller]
fn assert_fails<T>(result: Result<T>, expected: &str) {
    let message = result.err().expect("an error").to_string();
    assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
    assert!(!message.contains('\n'), "{message:?} has more than one line");
}

/// A new directory that is removed at the end of a test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("larql-gguf-{test}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, file: &File) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, file.bytes()).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// The value of a metadata key.
fn value_of<'a>(gguf: &'a Gguf, key: &str) -> Option<&'a Value> {
    gguf.metadata().iter().find(|(name, _)| name == key).map(|(_, value)| value)
}

#[test]
fn reads_every_scalar_type() {
    let file = File::default()
        .entry("u8", 0, &[255])
        .entry("i8", 1, &[255])
        .entry("u16", 2, &[1, 255])
        .entry("i16", 3, &[1, 255])
        .entry("u32", 4, &[1, 0, 0, 255])
        .entry("i32", 5, &[1, 0, 0, 255])
        .entry("f32", 6, &1.5f32.to_le_bytes())
        .entry("false", 7, &[0])
        .entry("true", 7, &[1])
        .entry("string", 8, &string("héllo"))
        .entry("u64", 10, &u64::MAX.to_le_bytes())
        .entry("i64", 11, &i64::MIN.to_le_bytes())
        .entry("f64", 12, &(-2.5f64).to_le_bytes());
    let expected = [
        ("u8", Value::U8(255)),
        ("i8", Value::I8(-1)),
        ("u16", Value::U16(0xff01)),
        ("i16", Value::I16(-255)),
        ("u32", Value::U32(0xff00_0001)),
        ("i32", Value::I32(-0x00ff_ffff)),
        ("f32", Value::F32(1.5)),
        ("false", Value::Bool(false)),
        ("true", Value::Bool(true)),
        ("string", Value::String("héllo".to_owned())),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(-2.5)),
    ];
    for version in [2, 3] {
        let header = File { version, metadata: file.metadata.clone(), ..File::default() }.parse().unwrap();
        assert_eq!(header.version, version);
        assert_eq!(header.metadata, expected.clone().map(|(key, value)| (key.to_owned(), value)));
    }
}

#[test]
fn reads_every_array_type() {
    let cases = [
        (array(0, 2, &[1, 255]), Array::U8(vec![1, 255])),
        (array(1, 2, &[1, 255]), Array::I8(vec![1, -1])),
        (array(2, 2, &[1, 0, 0, 1]), Array::U16(vec![1, 256])),
        (array(3, 1, &[254, 255]), Array::I16(vec![-2])),
        (array(4, 1, &[0, 0, 0, 128]), Array::U32(vec![1 << 31])),
        (array(5, 1, &[0, 0, 0, 128]), Array::I32(vec![i32::MIN])),
        (array(6, 1, &0.25f32.to_le_bytes()), Array::F32(vec![0.25])),
        (array(7, 3, &[1, 0, 1]), Array::Bool(vec![true, false, true])),
        (array(8, 2, &[string("a"), string("")].concat()), Array::String(vec!["a".to_owned(), String::new()])),
        (array(10, 1, &u64::MAX.to_le_bytes()), Array::U64(vec![u64::MAX])),
        (array(11, 1, &i64::MIN.to_le_bytes()), Array::I64(vec![i64::MIN])),
        (array(12, 1, &0.125f64.to_le_bytes()), Array::F64(vec![0.125])),
        (array(4, 0, &[]), Array::U32(Vec::new())),
        (
            array(9, 2, &[array(0, 1, &[7]), array(9, 1, &array(8, 1, &string("x")))].concat()),
            Array::Array(vec![Array::U8(vec![7]), Array::Array(vec![Array::String(vec!["x".to_owned()])])]),
        ),
    ];
    for (bytes, expected) in cases {
        let header = File::default().entry("key", ARRAY, &bytes).parse().unwrap();
        assert_eq!(header.metadata, [("key".to_owned(), Value::Array(expected))]);
    }
}

#[test]
fn places_tensors_of_every_type() {
    let mut file = File::default();
    let mut offset = 0;
    for (dtype, number) in DType::all().map(|dtype| (dtype, (0..64).find(|&n| DType::from_gguf(n) == Some(dtype)))) {
        file = file.tensor(dtype.name(), &[512, 3], number.unwrap(), offset as u64);
        offset = (offset + 3 * dtype.row_bytes(512).unwrap()).next_multiple_of(32);
    }
    let file = file.data(offset);
    let data_start = file.bytes().len() - offset;
    let header = file.parse().unwrap();
    let mut expected_start = data_start;
    for (tensor, dtype) in header.tensors.iter().zip(DType::all()) {
        assert_eq!((tensor.name.as_str(), tensor.dtype, &tensor.shape[..]), (dtype.name(), dtype, &[3, 512][..]));
        assert_eq!(tensor.n_bytes, 3 * dtype.row_bytes(512).unwrap());
        assert_eq!(tensor.start, expected_start);
        expected_start = (expected_start + tensor.n_bytes).next_multiple_of(32);
    }
    assert_eq!(header.tensors.len(), DType::all().count());
}

#[test]
fn follows_the_alignment() {
    for alignment in [8u32, 64, 1 << 21] {
        let mut file = File { alignment: alignment as usize, ..File::default() }
            .entry("general.alignment", U32, &alignment.to_le_bytes())
            .tensor("a", &[1], F32, 0)
            .tensor("b", &[1], F32, alignment.into());
        file.n_data_bytes = alignment as usize + 4;
        let header = file.parse().unwrap();
        let data_start = file.bytes().len() - file.n_data_bytes;
        assert_eq!(header.tensors[1].start, data_start + alignment as usize);
    }
    for alignment in [0u32, 1, 4, 31, 33, 1 << 22, u32::MAX] {
        let file = File::default().entry("general.alignment", U32, &alignment.to_le_bytes());
        file.fails_with(&format!("general.alignment is {alignment}, not a power of two from 8 to 2097152"));
    }
    File::default()
        .entry("general.alignment", 1, &[128])
        .fails_with("metadata key general.alignment is not an unsigned integer");
    File::default()
        .entry("general.alignment", STRING, &string("32"))
        .fails_with("metadata key general.alignment is not an unsigned integer");
}

#[test]
fn names_what_kind_of_file_it_is_not() {
    assert_fails(parse(b""), "is not a GGUF file: it starts with \"\"");
    assert_fails(parse(b"PK\x03\x04zip"), r#"is not a GGUF file: it starts with "PK\x03\x04" instead of "GGUF""#);
    assert_fails(parse(b"version https://git-lfs.github.com/spec/v1\n"), "is a Git LFS pointer");
    let version = |version| File { version, ..File::default() };
    version(1).fails_with("GGUF version 1 is not supported: fetch a newer file");
    version(0).fails_with("GGUF version 0 is not supported");
    version(4).fails_with("GGUF version 4 is not supported");
    version(3u32.swap_bytes()).fails_with("is a big-endian GGUF file: only little-endian files are supported");
    version(u32::MAX).fails_with("GGUF version 4294967295 is not supported");
}

#[test]
fn names_unsupported_weight_types() {
    let file = |number| File::default().tensor("x", &[256], number, 0).data(1024);
    file(23).fails_with("tensor \"x\": weight type 23 (IQ4_XS) is not supported; supported are F32 F16 BF16 Q4_0");
    file(10).fails_with("10 (Q2_K)");
    file(39).fails_with("39 (MXFP4)");
    file(99).fails_with("99 (unknown)");
    file(u32::MAX).fails_with("4294967295 (unknown)");
    for number in 0..=41 {
        let is_known = DType::from_gguf(number).is_some() ^ header::unsupported_type_name(number).is_some();
        assert!(is_known, "type {number} needs exactly one name");
    }
}

#[test]
fn refuses_bad_metadata() {
    let file = File::default;
    file().entry("k", 7, &[2]).fails_with("metadata key \"k\": a bool is 2 instead of 0 or 1");
    file().entry("k", ARRAY, &array(7, 1, &[255])).fails_with("metadata key \"k\": a bool is 255");
    file().entry("k", 13, &[0]).fails_with("metadata key \"k\": value type 13 is unknown");
    file().entry("k", ARRAY, &array(13, 0, &[])).fails_with("metadata key \"k\": array element type 13 is unknown");
    let not_utf8 = [&2u64.to_le_bytes()[..], b"a\xff"].concat();
    file().entry("k", STRING, &not_utf8).fails_with("metadata key \"k\": a string is not UTF-8");
    file().entry("k", 0, &[1]).entry("k", 0, &[1]).fails_with("metadata key \"k\" appears twice");
    file().entry(&"k".repeat(65_535), 0, &[1]).parse().unwrap();
    file().entry(&"k".repeat(65_536), 0, &[1]).fails_with("key of metadata entry 0: a name has 65536 bytes");
    let shortened = format!("metadata key \"\\n{}\"...: a bool is 2", "k".repeat(79));
    file().entry(&format!("\n{}", "k".repeat(200)), 7, &[2]).fails_with(&shortened);
}

#[test]
fn limits_nesting() {
    let nested = |levels: usize| (1..levels).fold(array(0, 1, &[5]), |inner, _| array(ARRAY, 1, &inner));
    File::default().entry("k", ARRAY, &nested(4)).parse().unwrap();
    for levels in [5, 1000, 10_000] {
        let file = File::default().entry("k", ARRAY, &nested(levels));
        file.fails_with("metadata key \"k\": arrays are nested more than 4 deep");
    }
}

#[test]
fn refuses_counts_beyond_the_file() {
    for n in [1000, 1 << 31, u32::MAX.into(), 1 << 61, 1 << 63, u64::MAX] {
        for element_type in 0..13 {
            let file = File::default().entry("k", ARRAY, &array(element_type, n, &[0; 16]));
            file.fails_with(&format!("metadata key \"k\": has {n} array elements where the file has room for"));
        }
        File::default().entry("k", STRING, &n.to_le_bytes()).fails_with("string bytes where the file has room for");
        for (field, items) in [(8, "tensors"), (16, "metadata entries")] {
            let mut bytes = File::default().entry("k", 0, &[1]).tensor("x", &[1], F32, 0).data(32).bytes();
            bytes[field..field + 8].copy_from_slice(&n.to_le_bytes());
            assert_fails(parse(&bytes), &format!("has {n} {items} where the file has room for"));
        }
    }
}

#[test]
fn limits_the_header() {
    let n_bytes = 64u64 << 20;
    let file = File::default().entry("k", STRING, &n_bytes.to_le_bytes()).data(65 << 20);
    file.fails_with("has 67108864 string bytes where a header of at most 67108864 bytes has room for 671088");
    let mut bytes = File::default().data(16 << 20).bytes();
    for (field, items) in [(8, "tensors"), (16, "metadata entries")] {
        bytes[field..field + 8].copy_from_slice(&131_073u64.to_le_bytes());
        assert_fails(parse(&bytes), &format!("has 131073 {items}, more than the 131072 that are supported"));
        bytes[field..field + 8].fill(0);
    }
}

#[test]
fn refuses_bad_tensors() {
    let file = || File::default().data(128);
    let file_end = file().tensor("x", &[33], F32, 0).bytes().len();
    file().tensor("x", &[], F32, 0).fails_with("tensor \"x\": has 0 dimensions where 1 to 4 are allowed");
    file().tensor("x", &[1; 5], F32, 0).fails_with("tensor \"x\": has 5 dimensions");
    file().tensor("x", &[4, 0], F32, 0).fails_with("tensor \"x\": has an empty dimension: its shape is [0, 4]");
    file()
        .tensor("x", &[33, 2], Q4_0, 0)
        .fails_with("tensor \"x\": has rows of 33 weights, not a multiple of the 32 in a Q4_0 block");
    file().tensor("x", &[1], F32, 0).tensor("x", &[1], F32, 32).fails_with("tensor \"x\" appears twice");
    file()
        .tensor("x", &[1], F32, 33)
        .fails_with("tensor \"x\": its data offset 33 is not a multiple of the alignment 32");
    file().tensor("x", &[32], F32, 0).parse().unwrap();
    file()
        .tensor("x", &[33], F32, 0)
        .fails_with(&format!("tensor \"x\": its data ends at byte {}, the file at byte {file_end}", file_end + 4));
    let overlapping = file().tensor("behind", &[1], F32, 32).tensor("before", &[9], F32, 0);
    let data_start = overlapping.bytes().len() - 128;
    overlapping.fails_with(&format!(
        "tensors \"before\" and \"behind\" overlap: one ends at byte {}, the other starts at {}",
        data_start + 36,
        data_start + 32
    ));
    file().tensor("a", &[1], F32, 0).tensor("b", &[1], F32, 0).fails_with("overlap");
}

#[test]
fn refuses_sizes_that_overflow() {
    let file = || File::default().data(128);
    for dims in [&[u64::MAX][..], &[1 << 62], &[1 << 32, 1 << 32], &[1 << 31, 1 << 31, 1 << 31, 1 << 31], &[1, 1 << 63]]
    {
        file().tensor("x", dims, F32, 0).fails_with("tensor \"x\": is too large for any file: its shape is [");
    }
    for offset in [1 << 63, u64::MAX - 31] {
        let fits_no_file = file().tensor("x", &[1], F32, offset).parse().unwrap_err().to_string();
        assert!(fits_no_file.contains("tensor \"x\": its data"), "{fits_no_file}");
    }
}

#[test]
fn refuses_every_truncation() {
    let bytes = File::default()
        .entry("k", ARRAY, &array(ARRAY, 2, &[array(8, 1, &string("abc")), array(7, 2, &[0, 1])].concat()))
        .entry("s", STRING, &string("abc"))
        .tensor("x", &[32, 2], Q4_0, 0)
        .data(36)
        .bytes();
    parse(&bytes).unwrap();
    for n in 0..bytes.len() {
        assert!(parse(&bytes[..n]).is_err(), "the first {n} bytes");
    }
}

#[test]
fn opens_one_file() {
    let folder = Folder::new("one");
    let file = File::default()
        .entry("general.architecture", STRING, &string("test"))
        .entry("split.count", U16, &[0, 0]) // as in a merged model
        .tensor("a", &[2], F32, 0)
        .tensor("b", &[1], F32, 32)
        .data(36);
    let path = folder.write("model.gguf", &file);
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!((gguf.version(), gguf.paths()), (3, &[path][..]));
    assert_eq!(value_of(&gguf, "general.architecture"), Some(&Value::String("test".to_owned())));
    assert_eq!(value_of(&gguf, "general.name"), None);
    assert_eq!(gguf.metadata().len(), 2);
    assert_eq!(gguf.tensors().iter().map(|tensor| &tensor.name[..]).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(gguf.bytes(gguf.tensor("a").unwrap()), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(gguf.bytes(gguf.tensor("b").unwrap()), [32, 33, 34, 35]);
    assert_eq!(gguf.tensor("c"), None);
}

#[test]
fn refuses_what_is_no_file() {
    let folder = Folder::new("no-file");
    let shown = |path: &Path, text: &str| format!("{}: {text}", path.display());
    assert_fails(Gguf::open(&folder.0), &shown(&folder.0, "is a directory"));
    let missing = folder.0.join("missing.gguf");
    assert_fails(Gguf::open(&missing), &shown(&missing, "there is no such file"));
    let empty = folder.0.join("empty.gguf");
    fs::write(&empty, b"").unwrap();
    assert_fails(Gguf::open(&empty), &shown(&empty, "the file is empty"));
    #[cfg(unix)]
    assert_fails(Gguf::open(Path::new("/dev/null")), "/dev/null: is not a regular file");
    let broken = folder.write("broken.gguf", &File { version: 1, ..File::default() });
    assert_fails(Gguf::open(&broken), &shown(&broken, "GGUF version 1 is not supported"));
}

/// Three shards; the first has metadata and no tensor, as some tools write them.
fn write_shards(folder: &Folder) -> [PathBuf; 3] {
    let files = [
        File::default().split(0, 3, 3).entry("general.name", STRING, &string("test")),
        File::default().split(1, 3, 3).tensor("a", &[1], F32, 0).tensor("b", &[1], F32, 32).data(36),
        File::default().split(2, 3, 3).tensor("c", &[2], F32, 0).data(8),
    ];
    [0, 1, 2].map(|no| folder.write(&format!("x-0000{}-of-00003.gguf", no + 1), &files[no]))
}

#[test]
fn opens_a_split_model_by_any_shard() {
    let folder = Folder::new("split");
    let paths = write_shards(&folder);
    for path in &paths {
        let gguf = Gguf::open(path).unwrap();
        assert_eq!(gguf.paths(), paths);
        assert_eq!(value_of(&gguf, "general.name"), Some(&Value::String("test".to_owned())));
        assert_eq!(gguf.tensors().iter().map(|tensor| &tensor.name[..]).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(gguf.bytes(gguf.tensor("b").unwrap()), [32, 33, 34, 35]);
        assert_eq!(gguf.bytes(gguf.tensor("c").unwrap()), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn refuses_bad_shards() {
    let folder = Folder::new("bad-shards");
    let [first, second, third] = write_shards(&folder);
    let renamed = folder.0.join("y.gguf");
    fs::copy(&first, &renamed).unwrap();
    assert_fails(Gguf::open(&renamed), "y.gguf: is one of 3 shards, but its name does not end in -00001-of-00003.gguf");

    let unchanged = fs::read(&second).unwrap();
    fs::write(&second, &unchanged[..unchanged.len() - 1]).unwrap();
    assert_fails(Gguf::open(&first), &format!("{}: tensor \"b\": its data ends", second.display()));
    fs::copy(&third, &second).unwrap();
    assert_fails(Gguf::open(&first), &format!("{}: is not shard 2 of 3 as its name says", second.display()));
    folder.write("x-00002-of-00003.gguf", &File::default());
    assert_fails(Gguf::open(&first), &format!("{}: is not shard 2 of 3 as its name says", second.display()));
    folder.write("x-00002-of-00003.gguf", &File::default().split(1, 3, 3).tensor("c", &[1], F32, 0).data(4));
    assert_fails(Gguf::open(&first), &format!("{}: another shard also has a tensor \"c\"", third.display()));
    folder.write("x-00002-of-00003.gguf", &File::default().split(1, 3, 3).tensor("a", &[1], F32, 0).data(4));
    assert_fails(Gguf::open(&first), "the shards hold 2 tensors where split.tensors.count is 3");
    fs::remove_file(&second).unwrap();
    assert_fails(Gguf::open(&third), &format!("of its 3 shards {} is missing", second.display()));

    folder.write("x-00001-of-00003.gguf", &File::default().split(3, 3, 3));
    assert_fails(Gguf::open(&first), "split.no is 3 where split.count is 3");
    folder.write("x-00001-of-00003.gguf", &File::default().entry("split.count", U16, &[3, 0]));
    assert_fails(Gguf::open(&first), "metadata key split.no is missing");
    let huge = File::default().entry("split.count", 10, &u64::MAX.to_le_bytes()).entry("split.no", U16, &[0, 0]).entry(
        "split.tensors.count",
        U16,
        &[0, 0],
    );
    let huge_path = folder.write(&format!("x-00001-of-{}.gguf", u64::MAX), &huge);
    assert_fails(Gguf::open(&huge_path), "is missing");
}
