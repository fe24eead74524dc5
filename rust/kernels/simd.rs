//! What a vector unit must offer to multiply packed weights: a few operations on the rows of a group.
//!
//! A group is the ROWS rows of a panel that one vector holds. Whatever the width, every operation is exact or rounds
//! each row by itself, so kernels built from them give the same bits on all of them.

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives

use super::int8::COLUMN_TILE;

/// How quants are stored, and so how many products fit into 16 bits; |x| <= 127.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Quants {
    /// From 0 to 15: sixteen products make at most 16 * 15 * 127 = 30,480.
    UpTo15,
    /// From 0 to 31: eight products make at most 8 * 31 * 127 = 31,496.
    UpTo31,
    /// From -8 to 7, stored with 8 added: sixteen products make at most 16 * 8 * 127 = 16,256.
    Above8,
    /// From -16 to 15, stored with 16 added: sixteen products make at most 16 * 16 * 127 = 32,512.
    Above16,
    /// From -32 to 31, stored with 32 added: eight products make at most 8 * 32 * 127 = 32,512.
    Above32,
    /// From -128 to 127: two products make at most 2 * 128 * 127 = 32,512.
    Signed,
}

impl Quants {
    /// What is added to quants where they are stored without a sign. A sum that begins at minus this times the sum of the
    /// activations may wrap around on its way, and ends as the sum of centred products.
    pub const fn offset(self) -> i16 {
        match self {
            Quants::UpTo15 | Quants::UpTo31 | Quants::Signed => 0,
            Quants::Above8 => 8,
            Quants::Above16 => 16,
            Quants::Above32 => 32,
        }
    }
}

/// A vector unit.
///
/// # Safety
/// - Zeros are valid values of `Bytes`, `Scale` and `Floats`.
/// - Every function may be called only where the CPU has the instruction set, with pointers to as many bytes as it
///   reads, and must be inlined into a function that is compiled for it: so no closures.
pub trait Simd {
    /// Rows of a group.
    const ROWS: usize;
    /// Vector registers.
    const REGISTERS: usize;
    /// Four bytes for each row.
    type Bytes: Copy;
    /// An integer scale for each row, in the form that `finish` wants.
    type Scale: Copy;
    /// Sixteen activations, of which products take four at a time.
    type Sixteen: Copy;
    /// A sum of products for each row.
    type Sum: Copy;
    /// An f32 for each row.
    type Floats: Copy;

    /// Reads 4 * ROWS bytes.
    unsafe fn bytes(at: *const u8) -> Self::Bytes;
    /// Keeps the bits of `mask` in each byte.
    unsafe fn and(a: Self::Bytes, mask: u8) -> Self::Bytes;
    /// Bytes whose bits in `mask` are zeros, with those of `from` there.
    unsafe fn insert(a: Self::Bytes, from: Self::Bytes, mask: u8) -> Self::Bytes;
    /// Shifts pairs of bytes to the right; bits that cross over between bytes are for the caller to mask.
    unsafe fn shift_right<const BITS: u32>(a: Self::Bytes) -> Self::Bytes;
    /// Shifts pairs of bytes to the left.
    unsafe fn shift_left<const BITS: u32>(a: Self::Bytes) -> Self::Bytes;

    /// Scales of 1.
    unsafe fn unit_scale() -> Self::Scale;
    /// Scales of the group that begins at row `row`, from one unsigned byte for each row of the panel.
    unsafe fn unsigned_scale(panel: *const u8, row: usize) -> Self::Scale;
    /// Scales from one signed byte for each row of the group.
    unsafe fn signed_scale(at: *const u8) -> Self::Scale;
    /// How many sums a sub-block of 32 columns takes: one, or one for each half.
    fn n_sums(kind: Quants) -> usize;
    /// Quants as `add_products` wants them.
    unsafe fn prepare(kind: Quants, w: Self::Bytes) -> Self::Bytes;
    /// Sixteen activations, which must not change as long as they are used: they may be read at each use.
    unsafe fn sixteen(x: *const i8) -> Self::Sixteen;
    /// Where a sum over as many columns begins as `n` pair sums belong to, every `step`th of those at `pairs`.
    unsafe fn start(kind: Quants, pairs: *const [i16; 2], step: usize, n: usize) -> Self::Sum;
    /// A sum plus the products of four columns with the activations 4 * four to 4 * four + 3.
    unsafe fn add_products(kind: Quants, sum: Self::Sum, w: Self::Bytes, x: Self::Sixteen, four: usize) -> Self::Sum;
    /// The same for some groups and a tile of columns, which have four activations each.
    #[inline(always)]
    unsafe fn add_tile<const R: usize>(
        kind: Quants,
        sums: &mut [[Self::Sum; R]; COLUMN_TILE],
        w: &[Self::Bytes; R],
        x: Self::Sixteen,
    ) {
        const { assert!(COLUMN_TILE == 4) };
        for (four, sums) in sums.iter_mut().enumerate() {
            for (sum, w) in sums.iter_mut().zip(w) {
                *sum = Self::add_products(kind, *sum, *w, x, four);
            }
        }
    }
    /// A sub-block's sums times its scales, which are one for each half. Exact: it is below 2^24.
    unsafe fn finish(kind: Quants, sums: [Self::Sum; 2], scales: [Self::Scale; 2]) -> Self::Floats;

    /// The same number for each row.
    unsafe fn splat(value: f32) -> Self::Floats;
    /// From one f32 for each row.
    unsafe fn from_f32(at: *const u8) -> Self::Floats;
    /// From one f16 for each row.
    unsafe fn from_f16(at: *const u8) -> Self::Floats;
    /// From one bfloat16 for each row.
    unsafe fn from_bf16(at: *const u8) -> Self::Floats;
    /// The group that begins at row `row`, from one unsigned byte for each row of the panel.
    unsafe fn from_unsigned(panel: *const u8, row: usize) -> Self::Floats;
    /// a + b
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a * b
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a * b + c, rounded once.
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// c - a * b, rounded once.
    unsafe fn negated_mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Writes ROWS numbers.
    unsafe fn store(a: Self::Floats, to: *mut f32);
}
