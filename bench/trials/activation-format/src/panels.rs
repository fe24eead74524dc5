//! A matrix of panels in memory, beginning at a cache line as in a mapped file.

use std::marker::PhantomData;

/// Structs of byte arrays.
///
/// # Safety
/// The alignment must be 1, there must be no padding, and any bytes must be valid.
pub unsafe trait Bytes {}

#[derive(Clone)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

/// Panels, [panel][group].
#[derive(Clone)]
pub struct Panels<P> {
    lines: Vec<Line>,
    n: usize,
    of: PhantomData<P>,
}

impl<P: Bytes> Panels<P> {
    /// `n` items of zeros.
    pub fn new(n: usize) -> Self {
        Self { lines: vec![Line { _bytes: [0; 64] }; (n * size_of::<P>()).div_ceil(64)], n, of: PhantomData }
    }

    /// All items.
    pub fn items(&self) -> &[P] {
        // SAFETY: there are bytes for n items, and any are valid at any alignment (contract of Bytes).
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.n) }
    }

    /// All items, to be filled.
    pub fn items_mut(&mut self) -> &mut [P] {
        // SAFETY: as in `items`; the lines are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.n) }
    }

    /// The bytes of all items.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the same memory.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.n * size_of::<P>()) }
    }
}
