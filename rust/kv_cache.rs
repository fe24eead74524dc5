//! Keys and values of token sequences, in pages of 64 positions that forks share.
//!
//! A sequence has one table of pages for each layer. Pages are reference-counted: a fork copies the tables, and
//! whoever writes to a shared page first gets a copy of it. Layers with a sliding window drop the pages that no
//! later position can see; a snapshot keeps them, so that going back to it needs no recomputation.

use crate::config::ModelConfig;
use crate::error::{Error, Result, input_error};
use crate::kernels::{LANES, Stored, TILE};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::collections::TryReserveError;
use std::ops::Range;
use std::sync::Arc;

/// Positions of one page: an attention tile.
pub const PAGE: usize = TILE;
/// Snapshots that a sequence keeps; the oldest goes first.
const MAX_SNAPSHOTS: usize = 8;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// Half precision, saturating.
    F16,
    /// As computed.
    F32,
}

impl KvType {
    fn bytes(self) -> usize {
        match self {
            KvType::F16 => size_of::<f16>(),
            KvType::F32 => size_of::<f32>(),
        }
    }
}

/// What all sequences of one engine have in common.
#[derive(Debug)]
pub struct KvLayout {
    /// Each layer's attention window.
    windows: Vec<Option<usize>>,
    n_kv_heads: usize,
    head_dim: usize,
    kv_type: KvType,
}

impl KvLayout {
    /// The layout for a model.
    pub fn new(config: &ModelConfig, kv_type: KvType) -> Self {
        Self {
            windows: config.layers.iter().map(|layer| layer.window).collect(),
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            kv_type,
        }
    }

    /// Elements of one head's keys (or values) in a page.
    fn head_len(&self) -> usize {
        PAGE * self.head_dim
    }

    /// Elements of the keys (or values) of a page.
    fn page_len(&self) -> usize {
        self.n_kv_heads * self.head_len()
    }

    /// Bytes of a page.
    fn page_bytes(&self) -> usize {
        2 * self.page_len() * self.kv_type.bytes()
    }

    /// Bytes that a sequence of `len` tokens takes, without those of its snapshots.
    pub fn bytes(&self, len: usize) -> usize {
        let n_pages = |window: &Option<usize>| len.div_ceil(PAGE) - first_kept_page(*window, len);
        self.windows.iter().map(n_pages).sum::<usize>().saturating_mul(self.page_bytes())
    }
}

/// First position that a later query can see when `len` tokens are held.
fn first_visible(window: Option<usize>, len: usize) -> usize {
    window.map_or(0, |w| (len + 1).saturating_sub(w))
}

/// First page that is kept when `len` tokens are held: one more than needed, so that going back a few tokens finds
/// everything in place.
fn first_kept_page(window: Option<usize>, len: usize) -> usize {
    (first_visible(window, len) / PAGE).saturating_sub(1)
}

/// Keys and values of one layer at PAGE positions.
///
/// Keys: [kv head, PAGE / LANES, head_dim, LANES]. Values: [kv head, PAGE, head_dim].
#[derive(Clone)]
struct Page {
    keys: Store,
    values: Store,
}

impl Page {
    fn zeroed(layout: &KvLayout) -> Result<Self> {
        let store = || {
            Store::zeroed(layout.kv_type, layout.page_len()).map_err(|_| {
                input_error!("there is no memory for the keys and values of more tokens: shorten the text")
            })
        };
        Ok(Self { keys: store()?, values: store()? })
    }
}

#[derive(Clone)]
enum Store {
    F16(Box<[f16]>),
    F32(Box<[f32]>),
}

impl Store {
    fn zeroed(kv_type: KvType, len: usize) -> std::result::Result<Self, TryReserveError> {
        Ok(match kv_type {
            KvType::F16 => Store::F16(zeros(len, f16::ZERO)?),
            KvType::F32 => Store::F32(zeros(len, 0.0)?),
        })
    }

    /// Appends the elements, little-endian.
    fn append_to(&self, bytes: &mut Vec<u8>) {
        match self {
            Store::F16(data) => data.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
            Store::F32(data) => data.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
        }
    }

    /// Takes the elements from bytes that `append_to` wrote for as many.
    fn fill_from(&mut self, bytes: &[u8]) {
        match self {
            Store::F16(data) => {
                let (elements, _) = bytes.as_chunks();
                data.iter_mut().zip(elements).for_each(|(value, bytes)| *value = f16::from_le_bytes(*bytes));
            }
            Store::F32(data) => {
                let (elements, _) = bytes.as_chunks();
                data.iter_mut().zip(elements).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
            }
        }
    }

    /// Writes `values`, element i at `place(i)`.
    fn scatter(&mut self, values: &[f32], room: &mut [f16], place: impl Fn(usize) -> usize) {
        match self {
            Store::F16(data) => {
                room.convert_from_f32_slice(values);
                room.iter().enumerate().for_each(|(i, value)| data[place(i)] = saturated(*value));
            }
            Store::F32(data) => values.iter().enumerate().for_each(|(i, value)| data[place(i)] = *value),
        }
    }

    fn part(&self, range: Range<usize>) -> Stored<'_> {
        match self {
            Store::F16(data) => Stored::F16(&data[range]),
            Store::F32(data) => Stored::F32(&data[range]),
        }
    }
}

fn zeros<T: Clone>(len: usize, zero: T) -> std::result::Result<Box<[T]>, TryReserveError> {
    let mut data = Vec::new();
    data.try_reserve_exact(len)?;
    data.resize(len, zero);
    Ok(data.into())
}

/// The largest finite number instead of an infinity.
fn saturated(value: f16) -> f16 {
    if value.is_infinite() { f16::MAX.copysign(value) } else { value }
}

/// One layer's pages; None where a window has moved past.
#[derive(Clone, Default)]
struct PageTable(Vec<Option<Arc<Page>>>);

impl PageTable {
    fn holds(&self, from: usize, to: usize) -> bool {
        (from / PAGE..to.div_ceil(PAGE)).all(|i| self.0.get(i).is_some_and(Option::is_some))
    }
}

/// The window pages of all layers at one length.
#[derive(Clone)]
struct Snapshot {
    len: usize,
    tables: Vec<PageTable>,
}

/// The K/V cache of one sequence.
#[derive(Clone)]
pub struct Sequence {
    layout: Arc<KvLayout>,
    len: usize,
    tables: Vec<PageTable>,
    snapshots: Vec<Snapshot>,
}

impl Sequence {
    /// An empty sequence.
    pub fn new(layout: Arc<KvLayout>) -> Self {
        let tables = vec![PageTable::default(); layout.windows.len()];
        Self { layout, len: 0, tables, snapshots: Vec::new() }
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this sequence was made for `layout`.
    pub fn has_layout(&self, layout: &Arc<KvLayout>) -> bool {
        Arc::ptr_eq(&self.layout, layout)
    }

    /// Makes pages for `n` more positions in every layer.
    ///
    /// # Errors
    /// `Error::Input` when there is no memory for them; some may be made.
    pub fn reserve(&mut self, n: usize) -> Result<()> {
        let n_pages = (self.len + n).div_ceil(PAGE);
        for table in &mut self.tables {
            while table.0.len() < n_pages {
                table.0.push(Some(Arc::new(Page::zeroed(&self.layout)?)));
            }
        }
        Ok(())
    }

    /// Stores one position's keys and values, both [kv head, head_dim], at a reserved position.
    pub fn write(&mut self, layer: usize, position: usize, keys: &[f32], values: &[f32]) {
        let (head_dim, head_len) = (self.layout.head_dim, self.layout.head_len());
        let page = self.tables[layer].0[position / PAGE].as_mut().expect("positions to write are reserved");
        let page = Arc::make_mut(page);
        let slot = position % PAGE;
        let mut room = vec![f16::ZERO; head_dim];
        for (head, (keys, values)) in keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate() {
            let base = head * head_len;
            let first_key = base + slot / LANES * head_dim * LANES + slot % LANES;
            page.keys.scatter(keys, &mut room, |d| first_key + d * LANES);
            page.values.scatter(values, &mut room, |d| base + slot * head_dim + d);
        }
    }

    /// Keys [PAGE / LANES, head_dim, LANES] and values [PAGE, head_dim] of one head in one page.
    pub fn tile(&self, layer: usize, page: usize, head: usize) -> (Stored<'_>, Stored<'_>) {
        let page = self.tables[layer].0[page].as_ref().expect("visible pages are kept");
        let head_len = self.layout.head_len();
        let range = head * head_len..(head + 1) * head_len;
        (page.keys.part(range.clone()), page.values.part(range))
    }

    /// Makes `n` written positions part of the sequence and drops what no window needs any more.
    pub fn commit(&mut self, n: usize) {
        self.len += n;
        for (table, window) in self.tables.iter_mut().zip(&self.layout.windows) {
            let kept_from = first_kept_page(*window, self.len);
            // Pages are dropped in order, so the first one that is gone ends the search.
            table.0[..kept_from].iter_mut().rev().take_while(|page| page.is_some()).for_each(|page| *page = None);
        }
    }

    /// Forgets what was reserved and written but not committed.
    pub fn rollback(&mut self) {
        let n_pages = self.len.div_ceil(PAGE);
        self.tables.iter_mut().for_each(|table| table.0.truncate(n_pages));
    }

    /// Keeps the windows of local layers as they are now.
    pub fn snapshot(&mut self) {
        if self.layout.windows.iter().all(Option::is_none) || self.snapshots.last().is_some_and(|s| s.len == self.len) {
            return;
        }
        if self.snapshots.len() == MAX_SNAPSHOTS {
            self.snapshots.remove(0);
        }
        let keep = |(table, window): (&PageTable, &Option<usize>)| {
            if window.is_some() { table.clone() } else { PageTable::default() }
        };
        let tables = self.tables.iter().zip(&self.layout.windows).map(keep).collect();
        self.snapshots.push(Snapshot { len: self.len, tables });
    }

    /// Forgets tokens from `length` on and returns the new length: smaller than asked where a window has moved past
    /// what is needed, namely that of the nearest snapshot, or 0.
    ///
    /// # Errors
    /// `Error::Input` when the sequence is shorter than `length`.
    pub fn truncate(&mut self, length: usize) -> Result<usize> {
        if length > self.len {
            return Err(Error::Input(format!("cannot truncate a sequence of {} tokens to {length}", self.len)));
        }
        self.snapshots.retain(|s| s.len <= length);
        let windows = &self.layout.windows;
        let complete = self.tables.iter().zip(windows).all(|(t, w)| t.holds(first_visible(*w, length), length));
        if complete {
            self.len = length;
        } else {
            self.len = self.snapshots.last().map_or(0, |s| s.len);
            for (layer, table) in self.tables.iter_mut().enumerate() {
                if windows[layer].is_some() {
                    *table = self.snapshots.last().map_or_else(PageTable::default, |s| s.tables[layer].clone());
                }
            }
        }
        self.rollback();
        Ok(self.len)
    }

    /// The content without its snapshots: the number of tokens, and of each layer the number of the first page that is
    /// kept, keys and values of this page, and so on to the last one. Little-endian, numbers in 8 bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.layout.bytes(self.len) + 8 * (1 + self.tables.len()));
        bytes.extend((self.len as u64).to_le_bytes());
        for table in &self.tables {
            let first = table.0.iter().take_while(|page| page.is_none()).count();
            bytes.extend((first as u64).to_le_bytes());
            for page in table.0[first..].iter().flatten() {
                page.keys.append_to(&mut bytes);
                page.values.append_to(&mut bytes);
            }
        }
        bytes
    }

    /// A sequence of `len` tokens from what `to_bytes` gave for a sequence of the same layout.
    ///
    /// # Errors
    /// `Error::Input` when the bytes are something else, or there is no memory.
    pub fn from_bytes(layout: Arc<KvLayout>, len: usize, bytes: &[u8]) -> Result<Self> {
        let mut rest = Reader(bytes);
        if rest.number()? != len {
            return Err(not_a_cache());
        }
        let n_pages = len.div_ceil(PAGE);
        let mut sequence = Self::new(layout.clone());
        for (table, window) in sequence.tables.iter_mut().zip(&layout.windows) {
            let first = rest.number()?;
            if first > first_visible(*window, len) / PAGE {
                return Err(not_a_cache());
            }
            table.0 = vec![None; first];
            for _ in first..n_pages {
                let half = layout.page_bytes() / 2;
                let (keys, values) = (rest.take(half)?, rest.take(half)?);
                let mut page = Page::zeroed(&layout)?;
                page.keys.fill_from(keys);
                page.values.fill_from(values);
                table.0.push(Some(Arc::new(page)));
            }
        }
        if !rest.0.is_empty() {
            return Err(not_a_cache());
        }
        sequence.len = len;
        Ok(sequence)
    }
}

/// What is left of some bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or_else(not_a_cache)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<usize> {
        let bytes = self.take(8)?.try_into().expect("8 bytes");
        usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| not_a_cache())
    }
}

fn not_a_cache() -> Error {
    input_error!("the keys and values are not those of a sequence of this model")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIM: usize = 4;

    fn layout(windows: &[Option<usize>], kv_type: KvType) -> Arc<KvLayout> {
        Arc::new(KvLayout { windows: windows.to_vec(), n_kv_heads: 2, head_dim: DIM, kv_type })
    }

    fn feed(sequence: &mut Sequence, n: usize, mark: f32) {
        sequence.reserve(n).unwrap();
        for position in sequence.len()..sequence.len() + n {
            for layer in 0..sequence.tables.len() {
                let keys: Vec<f32> = (0..2 * DIM).map(|i| mark + position as f32 + i as f32 / 8.0).collect();
                let values: Vec<f32> = keys.iter().map(|k| -k).collect();
                sequence.write(layer, position, &keys, &values);
            }
        }
        sequence.commit(n);
    }

    /// Key and value element 1 of head 1.
    fn element(sequence: &Sequence, layer: usize, position: usize) -> (f32, f32) {
        let (keys, values) = sequence.tile(layer, position / PAGE, 1);
        let slot = position % PAGE;
        let at = |stored: Stored, i: usize| match stored {
            Stored::F16(data) => data[i].to_f32(),
            Stored::F32(data) => data[i],
        };
        (at(keys, (slot / LANES * DIM + 1) * LANES + slot % LANES), at(values, slot * DIM + 1))
    }

    fn expect(sequence: &Sequence, layer: usize, positions: std::ops::Range<usize>, mark: f32) {
        for position in positions {
            let want = mark + position as f32 + 5.0 / 8.0;
            assert_eq!(element(sequence, layer, position), (want, -want), "position {position}");
        }
    }

    #[test]
    fn forks_share_until_one_writes() {
        let mut parent = Sequence::new(layout(&[None, Some(70)], KvType::F32));
        feed(&mut parent, 100, 0.0);
        let mut child = parent.clone();
        feed(&mut parent, 30, 100.0);
        feed(&mut child, 60, 200.0);
        expect(&parent, 0, 0..100, 0.0);
        expect(&parent, 0, 100..130, 100.0);
        expect(&child, 0, 0..100, 0.0);
        expect(&child, 0, 100..160, 200.0);
    }

    #[test]
    fn windows_drop_pages_and_snapshots_bring_them_back() {
        let mut sequence = Sequence::new(layout(&[None, Some(70)], KvType::F32));
        feed(&mut sequence, 200, 0.0);
        sequence.snapshot();
        feed(&mut sequence, 400, 0.0);
        assert!(sequence.tables[1].0[0].is_none() && sequence.tables[0].0[0].is_some());
        assert_eq!(sequence.truncate(590).unwrap(), 590);
        expect(&sequence, 1, 590 - 69..590, 0.0);
        assert_eq!(sequence.truncate(300).unwrap(), 200);
        expect(&sequence, 1, 200 - 69..200, 0.0);
        feed(&mut sequence, 300, 1000.0);
        expect(&sequence, 0, 0..200, 0.0);
        expect(&sequence, 0, 200..500, 1000.0);
        assert_eq!(sequence.truncate(200).unwrap(), 200);
        expect(&sequence, 1, 200 - 69..200, 0.0);
        assert_eq!(sequence.truncate(20).unwrap(), 0);
        assert!(sequence.truncate(1).is_err());
    }

    #[test]
    fn rollback_leaves_the_sequence_as_it_was() {
        let mut sequence = Sequence::new(layout(&[None], KvType::F32));
        feed(&mut sequence, 60, 0.0);
        sequence.reserve(200).unwrap();
        sequence.write(0, 60, &[9.0; 2 * DIM], &[9.0; 2 * DIM]);
        sequence.rollback();
        assert_eq!((sequence.len(), sequence.tables[0].0.len()), (60, 1));
        feed(&mut sequence, 10, 0.0);
        expect(&sequence, 0, 0..70, 0.0);
    }

    #[test]
    fn large_values_saturate() {
        let mut sequence = Sequence::new(layout(&[None], KvType::F16));
        sequence.reserve(1).unwrap();
        sequence.write(0, 0, &[1e9; 2 * DIM], &[-1e9; 2 * DIM]);
        assert_eq!(element(&sequence, 0, 0), (65_504.0, -65_504.0));
    }

    #[test]
    fn bytes_give_the_same_sequence() {
        for kv_type in [KvType::F16, KvType::F32] {
            let layout = layout(&[None, Some(40)], kv_type);
            let mut sequence = Sequence::new(layout.clone());
            for n in [0, 1, 69, 120] {
                feed(&mut sequence, n, 0.0);
                let bytes = sequence.to_bytes();
                let mut read = Sequence::from_bytes(layout.clone(), sequence.len(), &bytes).unwrap();
                assert_eq!(read.to_bytes(), bytes);
                assert_eq!(bytes.len(), layout.bytes(sequence.len()) + 3 * 8);
                feed(&mut read, 50, 0.0);
                expect(&read, 0, 0..read.len(), 0.0);
                expect(&read, 1, read.len().saturating_sub(39)..read.len(), 0.0);
            }
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let wide = layout(&[None, Some(100)], KvType::F16);
        let mut sequence = Sequence::new(wide.clone());
        feed(&mut sequence, 300, 0.0);
        let bytes = sequence.to_bytes();
        let refused = |layout: &Arc<KvLayout>, len, bytes: &[u8]| {
            let error = Sequence::from_bytes(layout.clone(), len, bytes).err().expect("refused");
            assert!(error.to_string().contains("not those of a sequence of this model"));
        };
        for n in [0, 7, 8, 20, 1000, bytes.len() - 1] {
            refused(&wide, 300, &bytes[..n]);
        }
        refused(&wide, 301, &bytes);
        refused(&wide, 300, &[&bytes[..], &[0]].concat());
        refused(&layout(&[None, Some(100)], KvType::F32), 300, &bytes);
        refused(&layout(&[None, None], KvType::F16), 300, &bytes);
        let huge = [&300_u64.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat();
        refused(&wide, 300, &huge);
    }
}
