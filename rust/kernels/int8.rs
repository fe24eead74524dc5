//! Activations in int8: what the integer kernels multiply weights with.
//!
//! A column is cut into blocks of QUANT_BLOCK elements with one f32 scale each, after its largest elements, which would
//! take the resolution from their block, have been set apart in f32 (Dettmers et al., 2022, set apart whole features).

#![allow(clippy::needless_range_loop)] // loops over lanes read best by index

/// Columns of weights and activations that are padded together: the longest block.
pub const GROUP: usize = 256;
/// Activations that share one scale.
pub const QUANT_BLOCK: usize = 32;
/// Activations that have sums of their own: as many as share the finest of the weights' scales.
pub const SUM_BLOCK: usize = 16;
/// Elements of a column that stay in f32.
pub const N_APART: usize = 2;

/// Columns that lie side by side for products with many.
pub const COLUMN_TILE: usize = 4;

/// An element that stays in f32; its quant is 0.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Apart {
    /// Its place in the column.
    pub index: u32,
    /// Its value.
    pub value: f32,
}

/// One column of activations: `x[i]` is about `quants[i] * scales[i / QUANT_BLOCK]`, but for those apart.
pub struct QuantisedRow<'a> {
    /// From -127 to 127, 0 past the end of the column up to a whole GROUP.
    pub quants: &'a mut [i8],
    /// One for each QUANT_BLOCK.
    pub scales: &'a mut [f32],
    /// Sum of each block's quants, times its scale.
    pub sums: &'a mut [f32],
    /// For each SUM_BLOCK, the sum of the quants k with k % 4 < 2, and that of the others: the two 16-bit lanes of one
    /// row in a vector.
    pub pair_sums: &'a mut [[i16; 2]],
    /// The elements in f32, in the order of their places.
    pub apart: &'a mut [Apart; N_APART],
}

/// Columns of activations in int8, one after the other, each padded to whole GROUPs.
#[derive(Clone, Copy)]
pub struct QuantisedRows<'a> {
    /// Elements of one padded column.
    pub stride: usize,
    /// [columns, stride]
    pub quants: &'a [i8],
    /// [columns, stride / QUANT_BLOCK]
    pub scales: &'a [f32],
    /// [columns, stride / QUANT_BLOCK]
    pub sums: &'a [f32],
    /// [columns, stride / SUM_BLOCK]
    pub pair_sums: &'a [[i16; 2]],
    /// [columns]
    pub apart: &'a [[Apart; N_APART]],
    /// The same once more, where there are many columns.
    pub tiles: Option<QuantisedTiles<'a>>,
}

/// Columns of activations in int8, COLUMN_TILE side by side; zeros fill the last tile up.
#[derive(Clone, Copy)]
pub struct QuantisedTiles<'a> {
    /// Elements of one padded column.
    pub stride: usize,
    /// [tiles, stride / 4]: four elements of each column
    pub quants: &'a [[[i8; 4]; COLUMN_TILE]],
    /// [tiles, stride / QUANT_BLOCK]
    pub scales: &'a [[f32; COLUMN_TILE]],
    /// [tiles, stride / QUANT_BLOCK]
    pub sums: &'a [[f32; COLUMN_TILE]],
    /// [tiles, stride / SUM_BLOCK]
    pub pair_sums: &'a [[[i16; 2]; COLUMN_TILE]],
}

/// Lays at most COLUMN_TILE columns side by side, and zeros where there are fewer. All have the length of `tile`.
pub fn interleave<T: Copy + Default>(columns: &[&[T]], tile: &mut [[T; COLUMN_TILE]]) {
    for c in 0..COLUMN_TILE {
        match columns.get(c) {
            Some(column) => tile.iter_mut().zip(*column).for_each(|(to, from)| to[c] = *from),
            None => tile.iter_mut().for_each(|to| to[c] = T::default()),
        }
    }
}

#[inline(always)]
pub fn quantise(x: &[f32], out: &mut QuantisedRow) {
    let (whole, rest) = x.as_chunks::<QUANT_BLOCK>();
    let mut last = [0.0; QUANT_BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let blocks = || whole.iter().chain((!rest.is_empty()).then_some(&last));
    out.quants[x.len()..].fill(0);
    out.scales.fill(0.0);
    for (max, block) in out.scales.iter_mut().zip(blocks()) {
        *max = f32::from_bits(largest(block));
    }
    set_apart(x, out);
    let all_quants = out.quants.as_chunks_mut::<QUANT_BLOCK>().0;
    for ((quants, block), scale) in all_quants.iter_mut().zip(blocks()).zip(out.scales.iter_mut()) {
        let max = *scale;
        // Smaller blocks have no representable inverse; they are zero to any sum they could join.
        let is_nothing = max < 1e-35;
        *scale = if is_nothing { 0.0 } else { max / 127.0 };
        quantise_block(block, if is_nothing { 0.0 } else { 127.0 / max }, quants);
    }
    for apart in &*out.apart {
        out.quants[apart.index as usize] = 0;
    }
    for (pairs, quants) in out.pair_sums.iter_mut().zip(out.quants.as_chunks::<SUM_BLOCK>().0) {
        *pairs = pair_sums(quants);
    }
    for ((sum, scale), pairs) in out.sums.iter_mut().zip(&*out.scales).zip(out.pair_sums.as_chunks::<2>().0) {
        let total = i32::from(pairs[0][0]) + i32::from(pairs[0][1]) + i32::from(pairs[1][0]) + i32::from(pairs[1][1]);
        *sum = scale * total as f32;
    }
}

/// A number's magnitude, as an integer that has the same order; NaN is above all.
#[inline(always)]
fn magnitude(x: f32) -> u32 {
    x.to_bits() & !(1 << 31)
}

/// The largest magnitude.
#[inline(always)]
fn largest(block: &[f32; QUANT_BLOCK]) -> u32 {
    let mut max = 0;
    for x in block {
        max = magnitude(*x).max(max);
    }
    max
}

/// Finds the N_APART largest magnitudes, the first of equal ones, and takes them out of their blocks' maxima, which
/// `out.scales` holds.
#[inline(always)]
fn set_apart(x: &[f32], out: &mut QuantisedRow) {
    *out.apart = [Apart::default(); N_APART];
    for n in 0..N_APART.min(x.len()) {
        let (mut block, mut max) = (0, magnitude(out.scales[0]));
        for (b, other) in out.scales.iter().enumerate() {
            if magnitude(*other) > max {
                (block, max) = (b, magnitude(*other));
            }
        }
        let (mut found, mut rest) = (None, 0);
        for (i, value) in x.iter().enumerate().skip(block * QUANT_BLOCK).take(QUANT_BLOCK) {
            if out.apart[..n].iter().any(|apart| apart.index as usize == i) {
                continue;
            }
            if found.is_none() && magnitude(*value) == max {
                found = Some(i);
            } else {
                rest = magnitude(*value).max(rest);
            }
        }
        let index = found.expect("the maximum is that of an element");
        out.apart[n] = Apart { index: index as u32, value: x[index] };
        out.scales[block] = f32::from_bits(rest);
    }
    out.apart.sort_unstable_by_key(|apart| apart.index);
}

/// Rounds to the nearest integers, ties to even. An element that stands apart may give nonsense.
#[inline(always)]
fn quantise_block(x: &[f32; QUANT_BLOCK], inverse: f32, quants: &mut [i8; QUANT_BLOCK]) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23, see math::exp
    let mut bits = [0; QUANT_BLOCK];
    for k in 0..QUANT_BLOCK {
        bits[k] = x[k].mul_add(inverse, ROUND).to_bits();
    }
    for k in 0..QUANT_BLOCK {
        quants[k] = bits[k] as i8;
    }
}

#[inline(always)]
fn pair_sums(quants: &[i8; SUM_BLOCK]) -> [i16; 2] {
    let mut sums = [0_i16; SUM_BLOCK];
    for k in 0..SUM_BLOCK {
        sums[k] = i16::from(quants[k]);
    }
    for k in 0..8 {
        sums[k] += sums[k + 8];
    }
    for k in 0..4 {
        sums[k] += sums[k + 4];
    }
    [sums[0] + sums[1], sums[2] + sums[3]]
}
