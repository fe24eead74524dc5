//! Products with many columns: a group of columns of some rows is unpacked once, then multiplied by all activations.
//!
//! A tile is some groups of rows times COLUMN_TILE activation columns. Its sums stay in registers, each broadcast of four
//! activations meets all groups of rows, and the unpacked weights stay in the innermost cache for all tiles. The
//! arithmetic, and so every bit, is that of `packed`.

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives
#![allow(clippy::needless_range_loop)] // loops over rows, groups and columns read best by index

use super::formats::{Format, sub_quants};
use super::int8::{COLUMN_TILE, GROUP, QUANT_BLOCK, QuantisedTiles, SUM_BLOCK};
use super::math::{LANES, Lanes};
use super::panel_block::Panels;
use super::prefetch::{self, prefetch_lines};
use super::simd::Simd;
use std::hint::black_box;
use std::mem::MaybeUninit;

/// Sub-blocks of a GROUP of columns.
const SUBS: usize = GROUP / QUANT_BLOCK;

/// The weights of R groups of rows in a GROUP of columns.
struct Unpacked<S: Simd, const R: usize> {
    /// Units of each sub-block.
    quants: [[[S::Bytes; R]; 8]; SUBS],
    scales: [[[S::Scale; 2]; R]; SUBS],
    mins: [[S::Floats; R]; SUBS],
    /// Scales of each block.
    d: [[S::Floats; R]; SUBS],
    m: [[S::Floats; R]; SUBS],
}

/// `out` [panels, n] = panels times n columns, as many groups of rows at a time as ROWS says.
///
/// # Safety
/// As for `packed::matmul_int8`; `x` has n columns of at least `w.cols` elements, and `out` the right length.
#[inline(always)]
pub unsafe fn multiply_tiles<S: Simd, F: Format, const ROWS: usize>(
    w: &Panels,
    x: &QuantisedTiles,
    n: usize,
    out: &mut [Lanes],
) {
    let n_groups = w.n_panels() * LANES / S::ROWS;
    let mut first = 0;
    macro_rules! in_turns_of {
        ($($rows:literal)*) => {$(
            while $rows <= ROWS && n_groups - first >= $rows {
                multiply_rows::<S, F, $rows>(w, first, x, n, out);
                first += $rows;
            }
        )*};
    }
    in_turns_of!(3 2 1);
}

/// R groups of rows from `first` on, counted over all panels, times all columns.
#[inline(always)]
unsafe fn multiply_rows<S: Simd, F: Format, const R: usize>(
    w: &Panels,
    first: usize,
    x: &QuantisedTiles,
    n: usize,
    out: &mut [Lanes],
) {
    // Panel and first row of each group.
    let mut places = [(0, 0); R];
    for r in 0..R {
        let row = (first + r) * S::ROWS;
        places[r] = (row / LANES, row % LANES);
    }
    let asks_ahead = prefetch::is_on();
    // Vectors of zeros.
    let mut unpacked: Unpacked<S, R> = MaybeUninit::zeroed().assume_init();
    for start in (0..w.cols).step_by(GROUP) {
        let n_blocks = GROUP.min(w.cols - start) / F::BLOCK_LEN;
        for b in 0..n_blocks {
            for r in 0..R {
                let block = w.one(places[r].0).block(start / F::BLOCK_LEN + b).as_ptr();
                unpack::<S, F, R>(block, places[r].1, b, r, &mut unpacked);
            }
        }
        let n_tiles = n.div_ceil(COLUMN_TILE);
        // While the tiles are multiplied, the weights of the next group are asked for, a share with each tile.
        let group_bytes = GROUP / F::BLOCK_LEN * w.block_bytes();
        let share = group_bytes.div_ceil(n_tiles).next_multiple_of(64);
        for tile in 0..n_tiles {
            if asks_ahead && tile * share < group_bytes {
                for r in 0..R {
                    let next = w.bytes.as_ptr().wrapping_add(next_group::<F>(w, places[r].0, start) + tile * share);
                    prefetch_lines(next, share);
                }
            }
            let mut acc = [[S::splat(0.0); R]; COLUMN_TILE];
            let used = COLUMN_TILE.min(n - tile * COLUMN_TILE);
            let at = |c: usize, r: usize| (places[r].0 * n + tile * COLUMN_TILE + c, places[r].1);
            if start > 0 {
                for c in 0..used {
                    for r in 0..R {
                        let (i, row) = at(c, r);
                        acc[c][r] = S::from_f32(out[i][row..].as_ptr().cast());
                    }
                }
            }
            multiply_tile::<S, F, R>(&unpacked, n_blocks, x, tile * x.stride + start, &mut acc);
            for c in 0..used {
                for r in 0..R {
                    let (i, row) = at(c, r);
                    S::store(acc[c][r], out[i][row..].as_mut_ptr());
                }
            }
        }
    }
}

/// Where the group of columns lies that follows the one at `start` of a panel: in the same panel, or at the beginning of
/// what is multiplied after it.
#[inline(always)]
fn next_group<F: Format>(w: &Panels, panel: usize, start: usize) -> usize {
    let panel_bytes = w.cols / F::BLOCK_LEN * w.block_bytes();
    if start + GROUP < w.cols {
        panel * panel_bytes + (start + GROUP) / F::BLOCK_LEN * w.block_bytes()
    } else {
        (panel + w.n_panels()) * panel_bytes
    }
}

/// Unpacks block b of group r.
#[inline(always)]
unsafe fn unpack<S: Simd, F: Format, const R: usize>(
    block: *const u8,
    row: usize,
    b: usize,
    r: usize,
    to: &mut Unpacked<S, R>,
) {
    let scales = F::scales(block);
    let n_subs = F::BLOCK_LEN / QUANT_BLOCK;
    for step in 0..n_subs / F::SUBS_PER_STEP {
        macro_rules! sub_block {
            ($($sub:literal)*) => {$(
                if $sub < F::SUBS_PER_STEP {
                    let s = step * F::SUBS_PER_STEP + $sub;
                    let w = sub_quants::<S, F, $sub>(block, step, row);
                    for g in 0..8 {
                        to.quants[b * n_subs + s][g][r] = w[g];
                    }
                    to.scales[b * n_subs + s][r] = F::scale::<S>(&scales, s, row);
                    if F::HAS_MIN {
                        to.mins[b * n_subs + s][r] = F::min::<S>(&scales, s, row);
                    }
                }
            )*};
        }
        sub_block!(0 1 2 3 4 5 6 7);
    }
    to.d[b][r] = S::from_f16(block.add(2 * row));
    if F::HAS_MIN {
        to.m[b][r] = F::m::<S>(block, row);
    }
}

/// Adds the product of R groups of rows with a tile of columns, whose elements begin at `at`, to `acc[c][r]`.
#[inline(always)]
unsafe fn multiply_tile<S: Simd, F: Format, const R: usize>(
    w: &Unpacked<S, R>,
    n_blocks: usize,
    x: &QuantisedTiles,
    at: usize,
    acc: &mut [[S::Floats; R]; COLUMN_TILE],
) {
    let n_subs = F::BLOCK_LEN / QUANT_BLOCK;
    let quants = x.quants.as_ptr().add(at / 4);
    let pairs = x.pair_sums.as_ptr().add(at / SUM_BLOCK);
    let scales = x.scales.as_ptr().add(at / QUANT_BLOCK);
    let x_sums = x.sums.as_ptr().add(at / QUANT_BLOCK);
    for b in 0..n_blocks {
        let mut products = [[S::splat(0.0); R]; COLUMN_TILE];
        for s in b * n_subs..(b + 1) * n_subs {
            let sums = sub_block_sums::<S, F, R>(w, s, quants.add(8 * s), pairs.add(2 * s));
            for c in 0..COLUMN_TILE {
                let scale = S::splat((*scales.add(s))[c]);
                for r in 0..R {
                    products[c][r] =
                        S::mul_add(scale, S::finish(F::QUANTS, sums[c][r], w.scales[s][r]), products[c][r]);
                }
            }
        }
        for c in 0..COLUMN_TILE {
            for r in 0..R {
                acc[c][r] = S::mul_add(w.d[b][r], products[c][r], acc[c][r]);
            }
        }
        if F::HAS_MIN {
            let mut mins = [[S::splat(0.0); R]; COLUMN_TILE];
            for s in b * n_subs..(b + 1) * n_subs {
                for c in 0..COLUMN_TILE {
                    let sum = S::splat((*x_sums.add(s))[c]);
                    for r in 0..R {
                        mins[c][r] = S::mul_add(sum, w.mins[s][r], mins[c][r]);
                    }
                }
            }
            for c in 0..COLUMN_TILE {
                for r in 0..R {
                    acc[c][r] = S::negated_mul_add(w.m[b][r], mins[c][r], acc[c][r]);
                }
            }
        }
    }
}

/// Sums of sub-block s with a tile of columns, whose activations are at `x`.
#[inline(always)]
unsafe fn sub_block_sums<S: Simd, F: Format, const R: usize>(
    w: &Unpacked<S, R>,
    s: usize,
    x: *const [[i8; 4]; COLUMN_TILE],
    pairs: *const [[i16; 2]; COLUMN_TILE],
) -> [[[S::Sum; 2]; R]; COLUMN_TILE] {
    let halves = S::n_sums(F::QUANTS);
    let zero = S::start(F::QUANTS, pairs.cast(), 1, 0);
    let mut all = [[[zero; 2]; R]; COLUMN_TILE];
    for half in 0..halves {
        let mut sums = [[zero; R]; COLUMN_TILE];
        for c in 0..COLUMN_TILE {
            let start = S::start(F::QUANTS, &raw const (*pairs.add(half))[c], COLUMN_TILE, 2 / halves);
            for r in 0..R {
                sums[c][r] = start;
            }
        }
        // Unrolled, the loop would have all its broadcasts at once, and too few registers.
        let n_units = black_box(8 / halves);
        for g in 0..n_units {
            let units = &w.quants[s][half * 8 / halves + g];
            S::add_tile(F::QUANTS, &mut sums, units, S::sixteen(x.add(half * 8 / halves + g).cast()));
        }
        for c in 0..COLUMN_TILE {
            for r in 0..R {
                all[c][r][half] = sums[c][r];
            }
        }
    }
    all
}
