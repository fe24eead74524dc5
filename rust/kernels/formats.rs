//! How the panel blocks of each quantised type are read, for any vector unit; `panel_block` says what they mean.

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives
#![allow(clippy::needless_range_loop)] // loops over lanes, groups and columns read best by index

use super::math::LANES;
use super::simd::{Quants, Simd};

/// Bytes of a panel's unit of four columns: four for each row.
const UNIT: usize = 4 * LANES;

/// How one type's panel blocks are read. `step` and SUB name a sub-block: `step * SUBS_PER_STEP + SUB`; `row` is the
/// group's first.
///
/// # Safety
/// As for `Simd`; `block` is a whole panel block.
pub trait Format {
    /// Columns of a block.
    const BLOCK_LEN: usize;
    /// Bytes of a source block.
    const BLOCK_BYTES: usize;
    /// Sub-blocks that are told apart at compile time.
    const SUBS_PER_STEP: usize;
    /// Whether minimums count.
    const HAS_MIN: bool;
    /// How quants are stored.
    const QUANTS: Quants;
    /// Integer scales and minimums of a block's rows.
    type Scales;

    /// Reads the integer scales of a block.
    unsafe fn scales(block: *const u8) -> Self::Scales;
    /// Quants of unit G (0 to 7) of a sub-block.
    unsafe fn quants<S: Simd, const SUB: usize, const G: usize>(block: *const u8, step: usize, row: usize) -> S::Bytes;
    /// A sub-block's integer scales: of its first and of its last 16 columns.
    unsafe fn scale<S: Simd>(scales: &Self::Scales, sub: usize, row: usize) -> [S::Scale; 2];
    /// A sub-block's integer minimums.
    unsafe fn min<S: Simd>(scales: &Self::Scales, sub: usize, row: usize) -> S::Floats;
    /// The factors of a block's minimums.
    unsafe fn m<S: Simd>(block: *const u8, row: usize) -> S::Floats;
}

/// The units of a sub-block, as products want them.
///
/// # Safety
/// As for `Format`.
#[inline(always)]
pub unsafe fn sub_quants<S: Simd, F: Format, const SUB: usize>(
    block: *const u8,
    step: usize,
    row: usize,
) -> [S::Bytes; 8] {
    [
        S::prepare(F::QUANTS, F::quants::<S, SUB, 0>(block, step, row)),
        S::prepare(F::QUANTS, F::quants::<S, SUB, 1>(block, step, row)),
        S::prepare(F::QUANTS, F::quants::<S, SUB, 2>(block, step, row)),
        S::prepare(F::QUANTS, F::quants::<S, SUB, 3>(block, step, row)),
        S::prepare(F::QUANTS, F::quants::<S, SUB, 4>(block, step, row)),
        S::prepare(F::QUANTS, F::quants::<S, SUB, 5>(block, step, row)),
        S::prepare(F::QUANTS, F::quants::<S, SUB, 6>(block, step, row)),
        S::prepare(F::QUANTS, F::quants::<S, SUB, 7>(block, step, row)),
    ]
}

/// The rows' part of unit `g` of a field.
#[inline(always)]
unsafe fn unit<S: Simd>(field: *const u8, g: usize, row: usize) -> S::Bytes {
    S::bytes(field.add(UNIT * g + 4 * row))
}

/// The low or the high nibbles.
#[inline(always)]
unsafe fn nibbles<S: Simd, const HIGH: bool>(bytes: S::Bytes) -> S::Bytes {
    if HIGH { S::and(S::shift_right::<4>(bytes), 15) } else { S::and(bytes, 15) }
}

/// Nibbles with bit `bit` of each byte of `high` as their fifth.
#[inline(always)]
unsafe fn with_fifth_bit<S: Simd>(nibbles: S::Bytes, high: S::Bytes, bit: usize) -> S::Bytes {
    let shifted = match bit {
        0 => S::shift_left::<4>(high),
        1 => S::shift_left::<3>(high),
        2 => S::shift_left::<2>(high),
        3 => S::shift_left::<1>(high),
        4 => high,
        5 => S::shift_right::<1>(high),
        6 => S::shift_right::<2>(high),
        _ => S::shift_right::<3>(high),
    };
    S::insert(nibbles, shifted, 16)
}

/// Defines a format with blocks of 32: one sub-block, no integer scales.
macro_rules! block_of_32 {
    ($name:ident, $bytes:literal, $kind:ident, $has_min:literal, |$block:ident, $row:ident| $quants:expr) => {
        #[allow(non_camel_case_types)]
        pub struct $name;

        impl Format for $name {
            const BLOCK_LEN: usize = 32;
            const BLOCK_BYTES: usize = $bytes;
            const SUBS_PER_STEP: usize = 1;
            const HAS_MIN: bool = $has_min;
            const QUANTS: Quants = Quants::$kind;
            type Scales = ();

            #[inline(always)]
            unsafe fn scales(_block: *const u8) {}

            #[inline(always)]
            unsafe fn quants<S: Simd, const SUB: usize, const G: usize>(
                $block: *const u8,
                _step: usize,
                $row: usize,
            ) -> S::Bytes {
                $quants
            }

            #[inline(always)]
            unsafe fn scale<S: Simd>(_scales: &(), _sub: usize, _row: usize) -> [S::Scale; 2] {
                [S::unit_scale(); 2]
            }

            #[inline(always)]
            unsafe fn min<S: Simd>(_scales: &(), _sub: usize, _row: usize) -> S::Floats {
                S::splat(1.0)
            }

            /// Stored as what is added, so that the sign changes.
            #[inline(always)]
            unsafe fn m<S: Simd>(block: *const u8, row: usize) -> S::Floats {
                S::mul(S::splat(-1.0), S::from_f16(block.add(32 + 2 * row)))
            }
        }
    };
}

/// Nibbles of a block of 32: units 0 to 3 have the low ones, the others the high ones of the same bytes.
#[inline(always)]
unsafe fn nibbles_of_32<S: Simd>(qs: *const u8, g: usize, row: usize) -> S::Bytes {
    let bytes = unit::<S>(qs, g % 4, row);
    if g < 4 { nibbles::<S, false>(bytes) } else { nibbles::<S, true>(bytes) }
}

/// The same with a fifth bit.
#[inline(always)]
unsafe fn five_bits_of_32<S: Simd>(qh: *const u8, qs: *const u8, g: usize, row: usize) -> S::Bytes {
    with_fifth_bit::<S>(nibbles_of_32::<S>(qs, g, row), unit::<S>(qh, 0, row), g)
}

block_of_32!(Q4_0, 18, Above8, false, |block, row| nibbles_of_32::<S>(block.add(32), G, row));
block_of_32!(Q4_1, 20, UpTo15, true, |block, row| nibbles_of_32::<S>(block.add(64), G, row));
block_of_32!(Q5_0, 22, Above16, false, |block, row| five_bits_of_32::<S>(block.add(32), block.add(96), G, row));
block_of_32!(Q5_1, 24, UpTo31, true, |block, row| five_bits_of_32::<S>(block.add(64), block.add(128), G, row));
block_of_32!(Q8_0, 34, Signed, false, |block, row| unit::<S>(block.add(32), G, row));

/// Scales and minimums of Q4_K and Q5_K: for each 32 columns, a byte for each row.
pub struct SixBitScales {
    scales: [[u8; LANES]; 8],
    mins: [[u8; LANES]; 8],
}

impl SixBitScales {
    /// From the 12 bytes of each row at `at`, as `quant::blocks` describes them.
    #[inline(always)]
    unsafe fn new(at: *const u8) -> Self {
        // SAFETY: the caller has 12 bytes for each row at `at`.
        let packed = unsafe { &*at.cast::<[[u8; LANES]; 12]>() };
        let mut all = Self { scales: [[0; LANES]; 8], mins: [[0; LANES]; 8] };
        for j in 0..4 {
            for r in 0..LANES {
                let (s, m, both) = (packed[j][r], packed[4 + j][r], packed[8 + j][r]);
                all.scales[j][r] = s & 63;
                all.mins[j][r] = m & 63;
                all.scales[4 + j][r] = (both & 15) | (s >> 6) << 4;
                all.mins[4 + j][r] = (both >> 4) | (m >> 6) << 4;
            }
        }
        all
    }
}

/// Defines what Q4_K and Q5_K have in common.
macro_rules! six_bit_format {
    ($name:ident, $bytes:literal, $kind:ident, $subs_per_step:literal,
     |$block:ident, $step:ident, $row:ident| $quants:expr) => {
        pub struct $name;

        impl Format for $name {
            const BLOCK_LEN: usize = 256;
            const BLOCK_BYTES: usize = $bytes;
            const SUBS_PER_STEP: usize = $subs_per_step;
            const HAS_MIN: bool = true;
            const QUANTS: Quants = Quants::$kind;
            type Scales = SixBitScales;

            #[inline(always)]
            unsafe fn scales(block: *const u8) -> SixBitScales {
                SixBitScales::new(block.add(64))
            }

            #[inline(always)]
            unsafe fn quants<S: Simd, const SUB: usize, const G: usize>(
                $block: *const u8,
                $step: usize,
                $row: usize,
            ) -> S::Bytes {
                $quants
            }

            #[inline(always)]
            unsafe fn scale<S: Simd>(scales: &SixBitScales, sub: usize, row: usize) -> [S::Scale; 2] {
                [S::unsigned_scale(scales.scales[sub].as_ptr(), row); 2]
            }

            #[inline(always)]
            unsafe fn min<S: Simd>(scales: &SixBitScales, sub: usize, row: usize) -> S::Floats {
                S::from_unsigned(scales.mins[sub].as_ptr(), row)
            }

            #[inline(always)]
            unsafe fn m<S: Simd>(block: *const u8, row: usize) -> S::Floats {
                S::from_f16(block.add(32 + 2 * row))
            }
        }
    };
}

/// Nibbles of 64 columns, 8 units: even sub-blocks have the low ones, odd ones the high ones.
#[inline(always)]
unsafe fn nibbles_of_64<S: Simd, const SUB: usize>(qs: *const u8, g: usize, row: usize) -> S::Bytes {
    let bytes = unit::<S>(qs, g, row);
    if SUB.is_multiple_of(2) { nibbles::<S, false>(bytes) } else { nibbles::<S, true>(bytes) }
}

six_bit_format!(Q4K, 144, UpTo15, 2, |block, step, row| nibbles_of_64::<S, SUB>(
    block.add(256 + 8 * UNIT * step),
    G,
    row
));
// All sub-blocks at compile time: each has its fifth bits at another place of the same bytes.
six_bit_format!(Q5K, 176, UpTo31, 8, |block, _step, row| with_fifth_bit::<S>(
    nibbles_of_64::<S, SUB>(block.add(768 + 8 * UNIT * (SUB / 2)), G, row),
    unit::<S>(block.add(256), G, row),
    SUB
));

pub struct Q6K;

impl Format for Q6K {
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = 210;
    const SUBS_PER_STEP: usize = 4;
    const HAS_MIN: bool = false;
    const QUANTS: Quants = Quants::Above32;
    /// Where the scales begin: a byte of each row for each 16 columns.
    type Scales = *const u8;

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> *const u8 {
        block.add(32)
    }

    /// Per 128 columns there are 24 units: for each half of a quarter 4 of high bits and 4 of nibbles, then 8 more of
    /// nibbles. Quarter SUB has its low bits in the low (SUB < 2) or high nibbles of the former (SUB even) or the latter,
    /// its high bits at bit 2 SUB.
    #[inline(always)]
    unsafe fn quants<S: Simd, const SUB: usize, const G: usize>(block: *const u8, step: usize, row: usize) -> S::Bytes {
        let units = block.add(288 + 24 * UNIT * step);
        let turn = 8 * (G / 4);
        let high = unit::<S>(units, turn + G % 4, row);
        let low = unit::<S>(units, if SUB.is_multiple_of(2) { turn + 4 + G % 4 } else { 16 + G }, row);
        let low = if SUB < 2 { nibbles::<S, false>(low) } else { nibbles::<S, true>(low) };
        let high = match SUB {
            0 => S::shift_left::<4>(high),
            1 => S::shift_left::<2>(high),
            2 => high,
            _ => S::shift_right::<2>(high),
        };
        S::insert(low, high, 0x30)
    }

    #[inline(always)]
    unsafe fn scale<S: Simd>(scales: &*const u8, sub: usize, row: usize) -> [S::Scale; 2] {
        let at = scales.add(2 * LANES * sub + row);
        [S::signed_scale(at), S::signed_scale(at.add(LANES))]
    }

    #[inline(always)]
    unsafe fn min<S: Simd>(_scales: &*const u8, _sub: usize, _row: usize) -> S::Floats {
        S::splat(0.0)
    }

    #[inline(always)]
    unsafe fn m<S: Simd>(_block: *const u8, _row: usize) -> S::Floats {
        S::splat(0.0)
    }
}
