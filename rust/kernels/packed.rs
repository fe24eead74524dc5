//! Products of packed weights with activations, for any vector unit.
//!
//! Quantised weights, per group of rows, sub-block s of QUANT_BLOCK columns and activation column c, as in
//! `scalar::matmul_int8`:
//!
//! ```text
//! products += x_scale[s] * (sum over k of scale[k] * quant[k] * x_quant[k])
//! mins     += x_sum[s] * min[s]
//! acc      += d * products - m * mins        at the end of each block
//! ```
//!
//! 1. A panel holds four consecutive quants of each row side by side, so one vector has the same columns of many rows,
//!    and one broadcast of four activations meets them all.
//! 2. Products are summed in 16 bits as long as that cannot overflow (`Quants`), then in 32: exactly.
//! 3. Every row keeps its lane, so there are no horizontal sums, and the bits are those of the scalar kernel.
//! 4. One column: all groups of the panel share its broadcasts. Several: they share the unpacked weights of a group.
//! 5. Fields of a panel block lie in the order of their use, so that a panel is read front to back.

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives
#![allow(clippy::needless_range_loop)] // loops over lanes, groups and columns read best by index

use super::activations::{GROUP, QUANT_BLOCK, QuantisedRows, SUM_BLOCK};
use super::math::{LANES, Lanes};
use super::panel_block::{Panel, add_apart};
use super::simd::{Quants, Simd};
use super::{prefetch, scalar};
use crate::quant::DType;

/// Bytes of a panel's unit of four columns: four for each row.
const UNIT: usize = 4 * LANES;

/// How one type's panel blocks are read. `step` and SUB name a sub-block: `step * SUBS_PER_STEP + SUB`; `row` is the
/// group's first.
///
/// # Safety
/// As for `Simd`; `block` is a whole panel block.
trait Format {
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

/// Columns of one pass, from the first element of the block in use.
struct Columns<const N: usize> {
    quants: [*const i8; N],
    scales: [*const f32; N],
    sums: [*const f32; N],
    pairs: [*const [i16; 2]; N],
}

/// `out[c]` = a panel times column c, for a vector unit with GROUPS groups in a panel, COLUMNS columns in one pass.
///
/// # Safety
/// - The CPU has the unit's instruction set, and the caller is compiled for it.
#[inline(always)]
pub unsafe fn matmul_int8<S: Simd, const GROUPS: usize, const COLUMNS: usize>(
    w: &Panel,
    x: &QuantisedRows,
    out: &mut [Lanes],
) {
    match w.dtype {
        DType::Q4_0 => multiply::<S, Q4_0, GROUPS, COLUMNS>(w, x, out),
        DType::Q4_1 => multiply::<S, Q4_1, GROUPS, COLUMNS>(w, x, out),
        DType::Q5_0 => multiply::<S, Q5_0, GROUPS, COLUMNS>(w, x, out),
        DType::Q5_1 => multiply::<S, Q5_1, GROUPS, COLUMNS>(w, x, out),
        DType::Q8_0 => multiply::<S, Q8_0, GROUPS, COLUMNS>(w, x, out),
        DType::Q4_K => multiply::<S, Q4K, GROUPS, COLUMNS>(w, x, out),
        DType::Q5_K => multiply::<S, Q5K, GROUPS, COLUMNS>(w, x, out),
        DType::Q6_K => multiply::<S, Q6K, GROUPS, COLUMNS>(w, x, out),
        DType::F32 | DType::F16 | DType::BF16 => panic!("{} has no quants", w.dtype.name()),
    }
}

#[inline(always)]
unsafe fn multiply<S: Simd, F: Format, const GROUPS: usize, const COLUMNS: usize>(
    w: &Panel,
    x: &QuantisedRows,
    out: &mut [Lanes],
) {
    const { assert!(GROUPS * S::ROWS == LANES) };
    let mut first = 0;
    while out.len() - first >= COLUMNS {
        for group in 0..GROUPS {
            multiply_panel::<S, F, 1, COLUMNS>(w, group * S::ROWS, x, first, &mut out[first..]);
        }
        first += COLUMNS;
    }
    while first < out.len() {
        multiply_panel::<S, F, GROUPS, 1>(w, 0, x, first, &mut out[first..]);
        first += 1;
    }
    add_apart(w, &x.apart[..out.len()], out);
}

/// `out[c]` = G groups of a panel, from row `row` on, times column `first + c`.
#[inline(always)]
unsafe fn multiply_panel<S: Simd, F: Format, const G: usize, const N: usize>(
    w: &Panel,
    row: usize,
    x: &QuantisedRows,
    first: usize,
    out: &mut [Lanes],
) {
    let panel_block = LANES * F::BLOCK_BYTES;
    let n_blocks = w.bytes.len() / panel_block;
    assert!(n_blocks * F::BLOCK_LEN <= x.stride && (first + N) * x.stride <= x.quants.len() && N <= out.len());
    assert!((first + N) * x.stride / QUANT_BLOCK <= x.scales.len().min(x.sums.len()));
    assert!((first + N) * x.stride / SUM_BLOCK <= x.pair_sums.len());
    let start = first * x.stride;
    let mut columns = Columns {
        quants: [x.quants.as_ptr(); N],
        scales: [x.scales.as_ptr(); N],
        sums: [x.sums.as_ptr(); N],
        pairs: [x.pair_sums.as_ptr(); N],
    };
    for c in 0..N {
        columns.quants[c] = columns.quants[c].add(start + c * x.stride);
        columns.scales[c] = columns.scales[c].add((start + c * x.stride) / QUANT_BLOCK);
        columns.sums[c] = columns.sums[c].add((start + c * x.stride) / QUANT_BLOCK);
        columns.pairs[c] = columns.pairs[c].add((start + c * x.stride) / SUM_BLOCK);
    }
    let distance = prefetch::distance();
    let mut acc = [[S::splat(0.0); G]; N];
    for i in 0..n_blocks {
        let block = w.bytes.as_ptr().add(i * panel_block);
        multiply_block::<S, F, G, N>(block, block.wrapping_add(distance), row, &columns, &mut acc);
        for c in 0..N {
            columns.quants[c] = columns.quants[c].add(F::BLOCK_LEN);
            columns.scales[c] = columns.scales[c].add(F::BLOCK_LEN / QUANT_BLOCK);
            columns.sums[c] = columns.sums[c].add(F::BLOCK_LEN / QUANT_BLOCK);
            columns.pairs[c] = columns.pairs[c].add(F::BLOCK_LEN / SUM_BLOCK);
        }
    }
    for c in 0..N {
        for g in 0..G {
            S::store(acc[c][g], out[c][row + g * S::ROWS..].as_mut_ptr());
        }
    }
}

/// `acc[c][g]` += group g of a panel block times column c; asks for the memory at `ahead`.
#[inline(always)]
unsafe fn multiply_block<S: Simd, F: Format, const G: usize, const N: usize>(
    block: *const u8,
    ahead: *const u8,
    row: usize,
    x: &Columns<N>,
    acc: &mut [[S::Floats; G]; N],
) {
    let scales = F::scales(block);
    let (mut products, mut mins) = ([[S::splat(0.0); G]; N], [[S::splat(0.0); G]; N]);
    for step in 0..F::BLOCK_LEN / QUANT_BLOCK / F::SUBS_PER_STEP {
        macro_rules! sub_block {
            ($sub:literal) => {
                if $sub < F::SUBS_PER_STEP {
                    let s = step * F::SUBS_PER_STEP + $sub;
                    if row == 0 {
                        let share = LANES * F::BLOCK_BYTES / (F::BLOCK_LEN / QUANT_BLOCK);
                        prefetch_lines::<S>(ahead.wrapping_add(s * share), share);
                    }
                    for g in 0..G {
                        let row = row + g * S::ROWS;
                        let w = [
                            F::quants::<S, $sub, 0>(block, step, row),
                            F::quants::<S, $sub, 1>(block, step, row),
                            F::quants::<S, $sub, 2>(block, step, row),
                            F::quants::<S, $sub, 3>(block, step, row),
                            F::quants::<S, $sub, 4>(block, step, row),
                            F::quants::<S, $sub, 5>(block, step, row),
                            F::quants::<S, $sub, 6>(block, step, row),
                            F::quants::<S, $sub, 7>(block, step, row),
                        ];
                        let scale = F::scale::<S>(&scales, s, row);
                        for c in 0..N {
                            let (quants, pairs) = (x.quants[c].add(s * QUANT_BLOCK), x.pairs[c].add(2 * s));
                            let sum = S::sub_block_sum(F::QUANTS, w, quants, pairs, scale);
                            products[c][g] = S::mul_add(S::splat(*x.scales[c].add(s)), sum, products[c][g]);
                        }
                        if F::HAS_MIN {
                            let min = F::min::<S>(&scales, s, row);
                            for c in 0..N {
                                mins[c][g] = S::mul_add(S::splat(*x.sums[c].add(s)), min, mins[c][g]);
                            }
                        }
                    }
                }
            };
        }
        sub_block!(0);
        sub_block!(1);
        sub_block!(2);
        sub_block!(3);
        sub_block!(4);
        sub_block!(5);
        sub_block!(6);
        sub_block!(7);
    }
    for g in 0..G {
        let row = row + g * S::ROWS;
        let d = S::from_f16(block.add(2 * row));
        for c in 0..N {
            acc[c][g] = S::mul_add(d, products[c][g], acc[c][g]);
        }
        if F::HAS_MIN {
            let m = F::m::<S>(block, row);
            for c in 0..N {
                acc[c][g] = S::negated_mul_add(m, mins[c][g], acc[c][g]);
            }
        }
    }
}

/// Asks for some lines; for a sub-block's share at a time, because a core can wait for few lines at once.
#[inline(always)]
unsafe fn prefetch_lines<S: Simd>(at: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        S::prefetch(at.wrapping_add(64 * line));
    }
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

/// Bit `bit` of each byte, as 16 or 0.
#[inline(always)]
unsafe fn fifth_bit<S: Simd>(bytes: S::Bytes, bit: usize) -> S::Bytes {
    let shifted = match bit {
        0 => S::shift_left::<4>(bytes),
        1 => S::shift_left::<3>(bytes),
        2 => S::shift_left::<2>(bytes),
        3 => S::shift_left::<1>(bytes),
        4 => bytes,
        5 => S::shift_right::<1>(bytes),
        6 => S::shift_right::<2>(bytes),
        _ => S::shift_right::<3>(bytes),
    };
    S::and(shifted, 16)
}

/// Defines a format with blocks of 32: one sub-block, no integer scales.
macro_rules! block_of_32 {
    ($name:ident, $bytes:literal, $kind:ident, $has_min:literal, |$block:ident, $row:ident| $quants:expr) => {
        #[allow(non_camel_case_types)]
        struct $name;

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
    S::or(nibbles_of_32::<S>(qs, g, row), fifth_bit::<S>(unit::<S>(qh, 0, row), g))
}

block_of_32!(Q4_0, 18, Above8, false, |block, row| nibbles_of_32::<S>(block.add(32), G, row));
block_of_32!(Q4_1, 20, UpTo15, true, |block, row| nibbles_of_32::<S>(block.add(64), G, row));
block_of_32!(Q5_0, 22, Above16, false, |block, row| five_bits_of_32::<S>(block.add(32), block.add(96), G, row));
block_of_32!(Q5_1, 24, UpTo31, true, |block, row| five_bits_of_32::<S>(block.add(64), block.add(128), G, row));
block_of_32!(Q8_0, 34, Signed, false, |block, row| unit::<S>(block.add(32), G, row));

/// Scales and minimums of Q4_K and Q5_K: for each 32 columns, a byte for each row.
struct SixBitScales {
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
        struct $name;

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
                [S::unsigned_scale(scales.scales[sub].as_ptr().add(row)); 2]
            }

            #[inline(always)]
            unsafe fn min<S: Simd>(scales: &SixBitScales, sub: usize, row: usize) -> S::Floats {
                S::from_unsigned(scales.mins[sub].as_ptr().add(row))
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
six_bit_format!(Q5K, 176, UpTo31, 8, |block, _step, row| S::or(
    nibbles_of_64::<S, SUB>(block.add(768 + 8 * UNIT * (SUB / 2)), G, row),
    fifth_bit::<S>(unit::<S>(block.add(256), G, row), SUB)
));

struct Q6K;

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
        S::or(low, S::and(high, 0x30))
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

/// How weights that are stored as floating point numbers become f32.
///
/// # Safety
/// As for `Simd`.
pub trait Plain {
    /// Bytes of a weight.
    const BYTES: usize;
    /// A weight of each row.
    unsafe fn load<S: Simd>(at: *const u8) -> S::Floats;
}

macro_rules! plain {
    ($name:ident, $bytes:literal, $from:ident) => {
        pub struct $name;

        impl Plain for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load<S: Simd>(at: *const u8) -> S::Floats {
                S::$from(at)
            }
        }
    };
}
plain!(F32, 4, from_f32);
plain!(F16, 2, from_f16);
plain!(BF16, 2, from_bf16);

/// See `scalar::matmul_f32`, which this is for quantised weights.
///
/// # Safety
/// As for `matmul_int8`.
#[inline(always)]
pub unsafe fn matmul_f32<S: Simd, const GROUPS: usize>(w: &Panel, x: &[f32], out: &mut [Lanes]) {
    match w.dtype {
        DType::F32 => multiply_plain::<S, F32, GROUPS>(w, x, out),
        DType::F16 => multiply_plain::<S, F16, GROUPS>(w, x, out),
        DType::BF16 => multiply_plain::<S, BF16, GROUPS>(w, x, out),
        _ => scalar::matmul_f32(w, x, out),
    }
}

#[inline(always)]
unsafe fn multiply_plain<S: Simd, P: Plain, const GROUPS: usize>(w: &Panel, x: &[f32], out: &mut [Lanes]) {
    const { assert!(GROUPS * S::ROWS == LANES) };
    assert!(w.bytes.len() == w.cols * LANES * P::BYTES && x.len() >= out.len() * w.cols);
    let (fours, rest) = out.as_chunks_mut::<4>();
    for (i, four) in fours.iter_mut().enumerate() {
        for group in 0..GROUPS {
            multiply_plain_panel::<S, P, 1, 4>(w, group * S::ROWS, x.as_ptr().add(4 * i * w.cols), four);
        }
    }
    let first = 4 * fours.len();
    for (i, one) in rest.iter_mut().enumerate() {
        multiply_plain_panel::<S, P, GROUPS, 1>(w, 0, x.as_ptr().add((first + i) * w.cols), std::array::from_mut(one));
    }
}

/// `out[c]` = G groups of a panel, from row `row` on, times the columns at `x`.
#[inline(always)]
unsafe fn multiply_plain_panel<S: Simd, P: Plain, const G: usize, const N: usize>(
    w: &Panel,
    row: usize,
    x: *const f32,
    out: &mut [Lanes; N],
) {
    let distance = prefetch::distance();
    let mut acc = [[S::splat(0.0); G]; N];
    for start in (0..w.cols).step_by(GROUP) {
        let end = w.cols.min(start + GROUP);
        let (mut even, mut odd) = ([[S::splat(0.0); G]; N], [[S::splat(0.0); G]; N]);
        let mut k = start;
        while k < end {
            let at = w.bytes.as_ptr().add((k * LANES + row) * P::BYTES);
            if row == 0 {
                prefetch_lines::<S>(at.wrapping_add(distance), 2 * LANES * P::BYTES);
            }
            add_weights::<S, P, G, N>(at, x.add(k), w.cols, &mut even);
            if k + 1 < end {
                add_weights::<S, P, G, N>(at.add(LANES * P::BYTES), x.add(k + 1), w.cols, &mut odd);
            }
            k += 2;
        }
        for c in 0..N {
            for g in 0..G {
                acc[c][g] = S::add(acc[c][g], S::add(even[c][g], odd[c][g]));
            }
        }
    }
    for c in 0..N {
        for g in 0..G {
            S::store(acc[c][g], out[c][row + g * S::ROWS..].as_mut_ptr());
        }
    }
}

/// `sums[c][g]` += one weight of each row in G groups, at `w`, times element 0 of column c at `x`.
#[inline(always)]
unsafe fn add_weights<S: Simd, P: Plain, const G: usize, const N: usize>(
    w: *const u8,
    x: *const f32,
    cols: usize,
    sums: &mut [[S::Floats; G]; N],
) {
    for g in 0..G {
        let weights = P::load::<S>(w.add(g * S::ROWS * P::BYTES));
        for c in 0..N {
            sums[c][g] = S::mul_add(S::splat(*x.add(c * cols)), weights, sums[c][g]);
        }
    }
}
