//! The kernels in portable Rust: the permanent reference, and what the compiler vectorises for each table.
//!
//! Rules that keep every bit the same however the work is cut: a result depends on its own row and column only,
//! additions follow the order of k (or the fixed lane order of `math`), and multiply-adds are fused.

#![allow(clippy::needless_range_loop)] // loops over lanes read best by index

use super::math::{self, LANES, Lanes};
use super::panel_block::PanelBlock;
use crate::pack::{PANEL, unpack_row};
use crate::quant::{DType, blocks::decode};

/// Columns of weights and activations that are padded together: the longest block.
pub const GROUP: usize = 256;
/// Activations that share one scale.
pub const QUANT_BLOCK: usize = 16;

const _: () = assert!(LANES == PANEL, "lanes are rows of a panel");

/// PANEL rows of a weight matrix, packed as `pack` describes.
#[derive(Clone, Copy)]
pub struct Panel<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Columns.
    pub cols: usize,
    /// Panel blocks, one for each block of a row.
    pub bytes: &'a [u8],
}

impl<'a> Panel<'a> {
    /// Bytes of a panel block.
    #[inline(always)]
    pub fn block_bytes(&self) -> usize {
        PANEL * self.dtype.block_bytes()
    }

    /// Panel blocks that together hold GROUP columns (the last one: the rest), with the first of these columns.
    #[inline(always)]
    fn groups(&self) -> impl Iterator<Item = (usize, &'a [u8])> {
        let group_bytes = GROUP / self.dtype.block_len() * self.block_bytes();
        self.bytes.chunks(group_bytes).enumerate().map(|(i, group)| (i * GROUP, group))
    }
}

/// One column of activations in int8: `x[i]` is about `quants[i] * scales[i / QUANT_BLOCK]`.
pub struct QuantisedRow<'a> {
    /// From -127 to 127, 0 past the end of the column up to a whole GROUP.
    pub quants: &'a mut [i8],
    /// One for each QUANT_BLOCK.
    pub scales: &'a mut [f32],
    /// Sum of each block's quants, times its scale.
    pub sums: &'a mut [f32],
}

/// Columns of activations in int8, one after the other, each padded to whole GROUPs.
pub struct QuantisedRows<'a> {
    /// Elements of one padded column.
    pub stride: usize,
    /// [columns, stride]
    pub quants: &'a [i8],
    /// [columns, stride / QUANT_BLOCK]
    pub scales: &'a [f32],
    /// [columns, stride / QUANT_BLOCK]
    pub sums: &'a [f32],
}

#[inline(always)]
pub fn matmul_f32(w: &Panel, x: &[f32], out: &mut [Lanes]) {
    let mut decoded = [[0.0; LANES]; GROUP];
    out.fill([0.0; LANES]);
    for (start, group) in w.groups() {
        let len = GROUP.min(w.cols - start);
        decode_group(w.dtype, group, &mut decoded[..len]);
        let column = |c: usize| &x[c * w.cols + start..][..len];
        let (fours, rest) = out.as_chunks_mut::<4>();
        let n_in_fours = fours.len() * 4;
        for (i, four) in fours.iter_mut().enumerate() {
            multiply_panel(&decoded[..len], [0, 1, 2, 3].map(|c| column(4 * i + c)), four);
        }
        for (i, one) in rest.iter_mut().enumerate() {
            multiply_panel(&decoded[..len], [column(n_in_fours + i)], std::array::from_mut(one));
        }
    }
}

/// The weights of some panel blocks as f32, [k, LANES].
#[inline(always)]
fn decode_group(dtype: DType, group: &[u8], out: &mut [Lanes]) {
    if !dtype.is_quantised() {
        return decode(dtype, group, out.as_flattened_mut());
    }
    let (mut blocks, mut row) = ([0; GROUP * 34 / 32], [0.0; GROUP]);
    let blocks = &mut blocks[..group.len() / PANEL];
    let row = &mut row[..out.len()];
    for r in 0..PANEL {
        unpack_row(dtype, group, r, blocks);
        decode(dtype, blocks, row);
        for (lanes, value) in out.iter_mut().zip(&*row) {
            lanes[r] = *value;
        }
    }
}

/// `acc[c]` += panel [k, LANES] times `x[c]` [k], in the order of k.
#[inline(always)]
fn multiply_panel<const N: usize>(panel: &[Lanes], x: [&[f32]; N], acc: &mut [Lanes; N]) {
    let mut sums = *acc;
    let x = x.map(|column| &column[..panel.len()]);
    for (k, weights) in panel.iter().enumerate() {
        for c in 0..N {
            let value = x[c][k];
            for i in 0..LANES {
                sums[c][i] = value.mul_add(weights[i], sums[c][i]);
            }
        }
    }
    *acc = sums;
}

#[inline(always)]
pub fn matmul_int8(w: &Panel, x: &QuantisedRows, out: &mut [Lanes]) {
    let mut block = PanelBlock::new();
    out.fill([0.0; LANES]);
    for (i, bytes) in w.bytes.chunks_exact(w.block_bytes()).enumerate() {
        block.unpack(w.dtype, bytes);
        for (c, acc) in out.iter_mut().enumerate() {
            multiply_block(&block, x, c * x.stride + i * w.dtype.block_len(), acc);
        }
    }
}

/// `acc` += one panel block times the activations from `start`.
///
/// Row r's sum is d * sum_s(scale * sum_k(quant * x_quant) * x_scale) - m * sum_s(min * x_sum), over the sub-blocks s of
/// QUANT_BLOCK columns: exact integers within a sub-block, one fused multiply-add for each sub-block and block.
#[inline(always)]
fn multiply_block(w: &PanelBlock, x: &QuantisedRows, start: usize, acc: &mut Lanes) {
    let (mut products, mut mins) = ([0.0; LANES], [0.0; LANES]);
    for s in 0..w.n_sub_blocks {
        let first = start + s * QUANT_BLOCK;
        let (x_scale, x_sum) = (x.scales[first / QUANT_BLOCK], x.sums[first / QUANT_BLOCK]);
        let mut sums = [0; LANES];
        for (quants, x_quant) in w.quants[s * QUANT_BLOCK..].iter().zip(&x.quants[first..first + QUANT_BLOCK]) {
            for r in 0..LANES {
                sums[r] += i32::from(quants[r]) * i32::from(*x_quant);
            }
        }
        for r in 0..LANES {
            products[r] = x_scale.mul_add((sums[r] * w.scales[s][r]) as f32, products[r]);
            mins[r] = x_sum.mul_add(w.mins[s][r], mins[r]);
        }
    }
    for r in 0..LANES {
        acc[r] = w.d[r].mul_add(products[r], acc[r]);
        if w.has_min {
            acc[r] = (-w.m[r]).mul_add(mins[r], acc[r]);
        }
    }
}

#[inline(always)]
pub fn quantise(x: &[f32], out: &mut QuantisedRow) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23, see math::exp
    out.quants[x.len()..].fill(0);
    out.scales.fill(0.0);
    out.sums.fill(0.0);
    for (b, block) in x.chunks(QUANT_BLOCK).enumerate() {
        let max = math::max_abs(block);
        // Smaller blocks have no representable inverse; they are zero to any sum they could join.
        if max < 1e-35 {
            out.quants[b * QUANT_BLOCK..][..block.len()].fill(0);
            continue;
        }
        let inverse = 127.0 / max;
        let mut total = 0;
        for (quant, value) in out.quants[b * QUANT_BLOCK..].iter_mut().zip(block) {
            let rounded = value.mul_add(inverse, ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
            total += rounded;
            *quant = rounded as i8;
        }
        out.scales[b] = max / 127.0;
        out.sums[b] = out.scales[b] * total as f32;
    }
}

#[inline(always)]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (math::sum_of_squares(x) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

#[inline(always)]
pub fn gate_silu(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g * math::sigmoid(*g) * u;
    }
}

#[inline(always)]
pub fn gate_gelu(gate: &mut [f32], up: &[f32]) {
    // x / 2 * (1 + tanh(y)) = x * sigmoid(2y), y = sqrt(2 / pi) * (x + 0.044715 x^3)
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
    for (g, u) in gate.iter_mut().zip(up) {
        let x = *g;
        let inner = TWICE_SQRT_2_OVER_PI * (0.044_715 * x * x).mul_add(x, x);
        *g = x * math::sigmoid(inner) * u;
    }
}

#[inline(always)]
pub fn softcap(x: &mut [f32], cap: f32) {
    for v in x {
        *v = cap * math::tanh(*v / cap);
    }
}

#[inline(always)]
pub fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Positions of an attention tile, and of a K/V page.
pub const TILE: usize = 64;

/// One query against the keys and values of TILE consecutive positions, of which some are visible.
pub struct AttentionTile<'a> {
    /// [head_dim]
    pub query: &'a [f32],
    /// [TILE / LANES, head_dim, LANES]: lane i of group g is position LANES * g + i.
    pub keys: &'a [f32],
    /// [TILE, head_dim]
    pub values: &'a [f32],
    /// First visible position within the tile.
    pub first: usize,
    /// One past the last visible position; greater than `first`.
    pub end: usize,
    /// Scores s become cap * tanh(s / cap).
    pub softcap: Option<f32>,
}

/// Attention of one query over the tiles so far (the running softmax of Milakov and Gimelshein, 2018).
pub struct SoftmaxState<'a> {
    /// Largest score so far; minus infinity at the start.
    pub max: f32,
    /// Sum of e^(score - max).
    pub sum: f32,
    /// Sum of e^(score - max) times the value rows, [head_dim].
    pub out: &'a mut [f32],
    /// Room for one tile's sum, [head_dim].
    pub scratch: &'a mut [f32],
}

#[inline(always)]
pub fn attend(tile: &AttentionTile, state: &mut SoftmaxState) {
    let head_dim = tile.query.len();
    let mut scores = [[f32::NEG_INFINITY; LANES]; TILE / LANES];
    for (group, keys) in scores.iter_mut().zip(tile.keys.as_chunks::<LANES>().0.chunks_exact(head_dim)) {
        let mut sums = [0.0; LANES];
        for (q, key) in tile.query.iter().zip(keys) {
            for i in 0..LANES {
                sums[i] = q.mul_add(key[i], sums[i]);
            }
        }
        *group = sums;
    }
    if let Some(cap) = tile.softcap {
        softcap(scores.as_flattened_mut(), cap);
    }
    let scores = scores.as_flattened_mut();
    let max = scores[tile.first..tile.end].iter().fold(f32::NEG_INFINITY, |m, s| if *s > m { *s } else { m });
    let mut sums = [0.0; LANES];
    for (position, score) in scores.iter_mut().enumerate() {
        *score = if (tile.first..tile.end).contains(&position) { math::exp(*score - max) } else { 0.0 };
        sums[position % LANES] += *score;
    }
    state.scratch.fill(0.0);
    for position in tile.first..tile.end {
        let weight = scores[position];
        let values = &tile.values[position * head_dim..][..head_dim];
        for (sum, value) in state.scratch.iter_mut().zip(values) {
            *sum = weight.mul_add(*value, *sum);
        }
    }
    // Each tile is summed against its own maximum, so tiles may be computed anywhere and merged in order.
    let new_max = if max > state.max { max } else { state.max };
    let (old, new) = (math::exp(state.max - new_max), math::exp(max - new_max));
    state.sum = (state.sum * old) + math::sum(sums) * new;
    for (out, sum) in state.out.iter_mut().zip(state.scratch.iter()) {
        *out = sum.mul_add(new, *out * old);
    }
    state.max = new_max;
}
