//! The kernels in portable Rust: the permanent reference, and what the compiler vectorises for each table.
//!
//! Rules that keep every bit the same however the work is cut: a result depends on its own row and column only,
//! additions follow the order of k (or the fixed lane order of `math`), and multiply-adds are fused.

#![allow(clippy::needless_range_loop)] // loops over lanes read best by index

use super::math::{self, LANES, Lanes};
use crate::quant::{
    DType,
    blocks::{Unpacked, decode, unpack},
};

/// Weights that are unpacked at a time: a K-quant block, or eight blocks of 32.
pub const GROUP: usize = 256;
/// Activations that share one scale.
pub const QUANT_BLOCK: usize = 16;

/// Some rows of a weight matrix, as stored.
pub struct WeightRows<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Columns.
    pub cols: usize,
    /// The rows' blocks, one row after the other.
    pub bytes: &'a [u8],
}

impl WeightRows<'_> {
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        self.cols / self.dtype.block_len() * self.dtype.block_bytes()
    }

    /// The bytes of each row's `len` weights from column `start`, both whole blocks.
    #[inline(always)]
    fn pieces(&self, start: usize, len: usize) -> impl Iterator<Item = &[u8]> {
        let bytes_of = |cols: usize| cols / self.dtype.block_len() * self.dtype.block_bytes();
        let range = bytes_of(start)..bytes_of(start + len);
        self.bytes.chunks_exact(self.row_bytes()).map(move |row| &row[range.clone()])
    }
}

/// Pieces of at most GROUP that cover `cols`: (start, length).
#[inline(always)]
fn groups(cols: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..cols).step_by(GROUP).map(move |start| (start, GROUP.min(cols - start)))
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
pub fn matmul_f32(w: &WeightRows, x: &[f32], out: &mut [Lanes]) {
    let mut row = [0.0; GROUP];
    let mut panel = [[0.0; LANES]; GROUP];
    out.fill([0.0; LANES]);
    for (start, len) in groups(w.cols) {
        for (r, piece) in w.pieces(start, len).enumerate() {
            decode(w.dtype, piece, &mut row[..len]);
            for (lanes, value) in panel.iter_mut().zip(&row[..len]) {
                lanes[r] = *value;
            }
        }
        let column = |c: usize| &x[c * w.cols + start..][..len];
        let (fours, rest) = out.as_chunks_mut::<4>();
        let n_in_fours = fours.len() * 4;
        for (i, four) in fours.iter_mut().enumerate() {
            multiply_panel(&panel[..len], [0, 1, 2, 3].map(|c| column(4 * i + c)), four);
        }
        for (i, one) in rest.iter_mut().enumerate() {
            multiply_panel(&panel[..len], [column(n_in_fours + i)], std::array::from_mut(one));
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
pub fn matmul_int8(w: &WeightRows, x: &QuantisedRows, out: &mut [Lanes]) {
    let mut unpacked = Unpacked::default();
    let mut sums = vec![[0.0; LANES]; out.len()];
    let piece_bytes = GROUP / w.dtype.block_len() * w.dtype.block_bytes();
    out.fill([0.0; LANES]);
    for (r, row) in w.bytes.chunks_exact(w.row_bytes()).enumerate() {
        sums.fill([0.0; LANES]);
        for (g, piece) in row.chunks(piece_bytes).enumerate() {
            let len = unpack(w.dtype, piece, &mut unpacked);
            unpacked.quants[len..].fill(0);
            unpacked.scales[len / QUANT_BLOCK..].fill(0.0);
            unpacked.mins[len / QUANT_BLOCK..].fill(0.0);
            for (c, sum) in sums.iter_mut().enumerate() {
                multiply_group(&unpacked, x, c * x.stride + g * GROUP, sum);
            }
        }
        for (lanes, sum) in out.iter_mut().zip(&sums) {
            lanes[r] = math::sum(*sum);
        }
    }
}

/// `acc` += one group of weights times the activations from `start`, spread over the lanes: even blocks' products to
/// the lower half, odd blocks' to the upper half, block b's minimum to lane b.
#[inline(always)]
fn multiply_group(w: &Unpacked, x: &QuantisedRows, start: usize, acc: &mut Lanes) {
    const BLOCKS: usize = GROUP / QUANT_BLOCK;
    let x_quants: &[i8; GROUP] = x.quants[start..].first_chunk().expect("columns are padded to whole groups");
    let of_blocks = |values: &[f32]| -> [f32; BLOCKS] {
        *values[start / QUANT_BLOCK..].first_chunk().expect("columns are padded to whole groups")
    };
    let (x_scales, x_sums) = (of_blocks(x.scales), of_blocks(x.sums));
    let mut sums = *acc;
    let mut scales = [0.0; BLOCKS];
    for b in 0..BLOCKS {
        scales[b] = w.scales[b] * x_scales[b];
        sums[b] = (-w.mins[b]).mul_add(x_sums[b], sums[b]);
    }
    let (w_pairs, x_pairs) = (w.quants.as_chunks::<32>().0, x_quants.as_chunks::<32>().0);
    for pair in 0..BLOCKS / 2 {
        let (w, x) = (&w_pairs[pair], &x_pairs[pair]);
        let (mut products, mut lane_scales) = ([0; LANES], [0.0; LANES]);
        for i in 0..8 {
            // Two products of at most 128 * 127 fit in 16 bits.
            products[i] = product(w[i], x[i]) + product(w[i + 8], x[i + 8]);
            products[i + 8] = product(w[i + 16], x[i + 16]) + product(w[i + 24], x[i + 24]);
            lane_scales[i] = scales[2 * pair];
            lane_scales[i + 8] = scales[2 * pair + 1];
        }
        for i in 0..LANES {
            sums[i] = lane_scales[i].mul_add(f32::from(products[i]), sums[i]);
        }
    }
    *acc = sums;
}

#[inline(always)]
fn product(w: i8, x: i8) -> i16 {
    i16::from(w) * i16::from(x)
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
