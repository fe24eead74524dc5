//! Products of packed, quantised weights with int8 activations, for any vector unit.
//!
//! Per group of rows, sub-block s of QUANT_BLOCK columns and activation column c, as in `scalar::matmul_int8`:
//!
//! ```text
//! products += x_scale[s] * (sum over k of scale[k] * quant[k] * x_quant[k])
//! mins     += x_sum[s] * min[s]
//! acc      += d * products - m * mins        at the end of each block
//! ```
//!
//! 1. A panel holds four consecutive quants of each row side by side, so one vector has the same columns of many rows,
//!    and one broadcast of four activations meets them all.
//! 2. Products are summed exactly: in 32 bits, or where the unit has no such instruction (AVX2, older NEON) in 16 as
//!    long as that cannot overflow (`Quants`), then in 32.
//! 3. Every row keeps its lane, so there are no horizontal sums, and the bits are those of the scalar kernel.
//! 4. One column: all groups of the panel share its broadcasts. A few: they share the unpacked weights of a group. Many:
//!    see `tiles`.
//! 5. Fields of a panel block lie in the order of their use, so that a panel is read front to back.

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives
#![allow(clippy::needless_range_loop)] // loops over lanes, groups and columns read best by index

use super::formats::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, sub_quants};
use super::int8::{COLUMN_TILE, QUANT_BLOCK, QuantisedRows, SUM_BLOCK};
use super::math::{LANES, Lanes};
use super::panel_block::{Panels, add_apart};
use super::prefetch;
use super::simd::{Quants, Simd};
use super::tiles::multiply_tiles;
use crate::quant::DType;

/// `out` [panels, columns] = panels times columns, for a vector unit with GROUPS groups in a panel, FEW columns at a time
/// straight from packed weights, or tiles with ROWS groups.
///
/// # Safety
/// - The CPU has the unit's instruction set, and the caller is compiled for it.
#[inline(always)]
pub unsafe fn matmul_int8<S: Simd, const GROUPS: usize, const FEW: usize, const ROWS: usize>(
    w: &Panels,
    x: &QuantisedRows,
    out: &mut [Lanes],
) {
    match w.dtype {
        DType::Q4_0 => multiply::<S, Q4_0, GROUPS, FEW, ROWS>(w, x, out),
        DType::Q4_1 => multiply::<S, Q4_1, GROUPS, FEW, ROWS>(w, x, out),
        DType::Q5_0 => multiply::<S, Q5_0, GROUPS, FEW, ROWS>(w, x, out),
        DType::Q5_1 => multiply::<S, Q5_1, GROUPS, FEW, ROWS>(w, x, out),
        DType::Q8_0 => multiply::<S, Q8_0, GROUPS, FEW, ROWS>(w, x, out),
        DType::Q4_K => multiply::<S, Q4K, GROUPS, FEW, ROWS>(w, x, out),
        DType::Q5_K => multiply::<S, Q5K, GROUPS, FEW, ROWS>(w, x, out),
        DType::Q6_K => multiply::<S, Q6K, GROUPS, FEW, ROWS>(w, x, out),
        DType::F32 | DType::F16 | DType::BF16 => panic!("{} has no quants", w.dtype.name()),
    }
}

#[inline(always)]
unsafe fn multiply<S: Simd, F: Format, const GROUPS: usize, const FEW: usize, const ROWS: usize>(
    w: &Panels,
    x: &QuantisedRows,
    out: &mut [Lanes],
) {
    const { assert!(GROUPS * S::ROWS == LANES) };
    let n = x.apart.len();
    assert!(out.len() == n * w.n_panels() && w.cols <= x.stride && n * x.stride <= x.quants.len());
    assert!(n * x.stride / QUANT_BLOCK <= x.scales.len().min(x.sums.len()));
    assert!(n * x.stride / SUM_BLOCK <= x.pair_sums.len());
    if let Some(tiles) = &x.tiles {
        assert!(tiles.stride >= w.cols && tiles.quants.len() * 4 >= n.div_ceil(COLUMN_TILE) * tiles.stride);
        assert!(tiles.scales.len().min(tiles.sums.len()) * QUANT_BLOCK >= n.div_ceil(COLUMN_TILE) * tiles.stride);
        assert!(tiles.pair_sums.len() * SUM_BLOCK >= n.div_ceil(COLUMN_TILE) * tiles.stride);
        multiply_tiles::<S, F, ROWS>(w, tiles, n, out);
    } else {
        for i in 0..w.n_panels() {
            multiply_few::<S, F, GROUPS, FEW>(&w.one(i), x, &mut out[i * n..][..n]);
        }
    }
    for i in 0..w.n_panels() {
        add_apart(&w.one(i), x.apart, &mut out[i * n..][..n]);
    }
}

#[inline(always)]
unsafe fn multiply_few<S: Simd, F: Format, const GROUPS: usize, const FEW: usize>(
    w: &Panels,
    x: &QuantisedRows,
    out: &mut [Lanes],
) {
    let mut first = 0;
    macro_rules! in_turns_of {
        ($n:literal) => {
            while $n <= FEW && out.len() - first >= $n {
                for group in 0..GROUPS {
                    multiply_panel::<S, F, 1, $n>(w, group * S::ROWS, x, first, &mut out[first..]);
                }
                first += $n;
            }
        };
    }
    in_turns_of!(8);
    in_turns_of!(4);
    in_turns_of!(2);
    if first < out.len() {
        multiply_panel::<S, F, GROUPS, 1>(w, 0, x, first, &mut out[first..]);
    }
}

/// Columns of one pass, from the first element of the block in use.
struct Columns<const N: usize> {
    quants: [*const i8; N],
    scales: [*const f32; N],
    sums: [*const f32; N],
    pairs: [*const [i16; 2]; N],
}

/// `out[c]` = G groups of a panel, from row `row` on, times column `first + c`.
#[inline(always)]
unsafe fn multiply_panel<S: Simd, F: Format, const G: usize, const N: usize>(
    w: &Panels,
    row: usize,
    x: &QuantisedRows,
    first: usize,
    out: &mut [Lanes],
) {
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
    let (distance, asks_ahead) = (prefetch::distance(), prefetch::is_on());
    let mut acc = [[S::splat(0.0); G]; N];
    for i in 0..w.cols / F::BLOCK_LEN {
        let block = w.bytes.as_ptr().add(i * w.block_bytes());
        let ahead = if asks_ahead { Some(block.wrapping_add(distance)) } else { None };
        multiply_block::<S, F, G, N>(block, ahead, row, &columns, &mut acc);
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
    ahead: Option<*const u8>,
    row: usize,
    x: &Columns<N>,
    acc: &mut [[S::Floats; G]; N],
) {
    let scales = F::scales(block);
    let (mut products, mut mins) = ([[S::splat(0.0); G]; N], [[S::splat(0.0); G]; N]);
    for step in 0..F::BLOCK_LEN / QUANT_BLOCK / F::SUBS_PER_STEP {
        macro_rules! sub_block {
            ($($sub:literal)*) => {$(
                if $sub < F::SUBS_PER_STEP {
                    let s = step * F::SUBS_PER_STEP + $sub;
                    if row == 0 && let Some(ahead) = ahead {
                        let share = LANES * F::BLOCK_BYTES / (F::BLOCK_LEN / QUANT_BLOCK);
                        prefetch::prefetch_lines(ahead.wrapping_add(s * share), share);
                    }
                    for g in 0..G {
                        let row = row + g * S::ROWS;
                        let w = sub_quants::<S, F, $sub>(block, step, row);
                        let scale = F::scale::<S>(&scales, s, row);
                        for c in 0..N {
                            let (quants, pairs) = (x.quants[c].add(s * QUANT_BLOCK), x.pairs[c].add(2 * s));
                            let sum = dot::<S>(F::QUANTS, &w, quants, pairs, scale);
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
            )*};
        }
        sub_block!(0 1 2 3 4 5 6 7);
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

/// A sub-block's quants times the activations at `x`, scaled.
#[inline(always)]
unsafe fn dot<S: Simd>(
    kind: Quants,
    w: &[S::Bytes; 8],
    x: *const i8,
    pairs: *const [i16; 2],
    scales: [S::Scale; 2],
) -> S::Floats {
    let n = S::n_sums(kind);
    let mut sums = [S::start(kind, pairs, 1, 2 / n), S::start(kind, pairs.add(1), 1, n - 1)];
    for g in 0..8 {
        let sixteen = S::sixteen(x.add(g / 4 * 16));
        sums[g * n / 8] = S::add_products(kind, sums[g * n / 8], w[g], sixteen, g % 4);
    }
    S::finish(kind, sums, scales)
}
