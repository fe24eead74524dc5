//! The kernels in portable Rust: the permanent reference, and what the compiler vectorises for each table.
//!
//! Rules that keep every bit the same however the work is cut: a result depends on its own row and column only,
//! additions follow the order of k (or the fixed lane order of `math`), and multiply-adds are fused.

#![allow(clippy::needless_range_loop)] // loops over lanes read best by index

use super::int8::{GROUP, QUANT_BLOCK, QuantisedRows, SUM_BLOCK};
use super::math::{self, LANES, Lanes};
use super::panel_block::{self, Panels};
use crate::pack::{PANEL, unpack_row};
use crate::quant::{DType, blocks::decode};

#[inline(always)]
pub fn matmul_f32(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    let n = x.len() / w.cols;
    for i in 0..w.n_panels() {
        multiply_panel_f32(&w.one(i), x, &mut out[i * n..][..n]);
    }
}

#[inline(always)]
fn multiply_panel_f32(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    let mut decoded = [[0.0; LANES]; GROUP];
    out.fill([0.0; LANES]);
    let group_bytes = GROUP / w.dtype.block_len() * w.block_bytes();
    for (i, group) in w.bytes.chunks(group_bytes).enumerate() {
        let start = i * GROUP;
        let len = GROUP.min(w.cols - start);
        decode_group(w.dtype, group, &mut decoded[..len]);
        let column = |c: usize| &x[c * w.cols + start..][..len];
        let (fours, rest) = out.as_chunks_mut::<4>();
        let n_in_fours = fours.len() * 4;
        for (i, four) in fours.iter_mut().enumerate() {
            multiply_group(&decoded[..len], [0, 1, 2, 3].map(|c| column(4 * i + c)), four);
        }
        for (i, one) in rest.iter_mut().enumerate() {
            multiply_group(&decoded[..len], [column(n_in_fours + i)], std::array::from_mut(one));
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

/// `acc[c]` += up to GROUP columns of weights [k, LANES] times `x[c]` [k]: even and odd k are summed apart, each in order.
#[inline(always)]
fn multiply_group<const N: usize>(weights: &[Lanes], x: [&[f32]; N], acc: &mut [Lanes; N]) {
    let mut sums = [[[0.0; LANES]; N]; 2];
    let x = x.map(|column| &column[..weights.len()]);
    for (k, weights) in weights.iter().enumerate() {
        for c in 0..N {
            let (value, sum) = (x[c][k], &mut sums[k % 2][c]);
            for i in 0..LANES {
                sum[i] = value.mul_add(weights[i], sum[i]);
            }
        }
    }
    for c in 0..N {
        for i in 0..LANES {
            acc[c][i] += sums[0][c][i] + sums[1][c][i];
        }
    }
}

/// A panel block as integers: quants [k], scales and minimums for each SUM_BLOCK.
struct Unpacked {
    quants: [[i8; LANES]; GROUP],
    scales: [panel_block::Integers; GROUP / SUM_BLOCK],
    mins: [panel_block::Integers; GROUP / SUM_BLOCK],
}

#[inline(always)]
pub fn matmul_int8(w: &Panels, x: &QuantisedRows, out: &mut [Lanes]) {
    let n = x.apart.len();
    for i in 0..w.n_panels() {
        multiply_panel_int8(&w.one(i), x, &mut out[i * n..][..n]);
    }
}

#[inline(always)]
fn multiply_panel_int8(w: &Panels, x: &QuantisedRows, out: &mut [Lanes]) {
    out.fill([0.0; LANES]);
    let block_len = w.dtype.block_len();
    let mut block = Unpacked {
        quants: [[0; LANES]; GROUP],
        scales: [[0; LANES]; GROUP / SUM_BLOCK],
        mins: [[0; LANES]; GROUP / SUM_BLOCK],
    };
    for i in 0..w.cols / block_len {
        let bytes = w.block(i);
        for k in 0..block_len {
            let quants = panel_block::quant(w.dtype, bytes, k);
            for r in 0..LANES {
                block.quants[k][r] = quants[r] as i8;
            }
        }
        for s in 0..block_len / SUM_BLOCK {
            block.scales[s] = panel_block::scale(w.dtype, bytes, s * SUM_BLOCK);
            block.mins[s] = panel_block::min(w.dtype, bytes, s * SUM_BLOCK);
        }
        let (d, m) = (panel_block::d(bytes), panel_block::m(w.dtype, bytes));
        for (c, acc) in out.iter_mut().enumerate() {
            let (products, mins) = multiply_block(&block, block_len, x, c * x.stride + i * block_len);
            for r in 0..LANES {
                acc[r] = d[r].mul_add(products[r], acc[r]);
                if panel_block::has_min(w.dtype) {
                    acc[r] = (-m[r]).mul_add(mins[r], acc[r]);
                }
            }
        }
    }
    panel_block::add_apart(w, x.apart, out);
}

/// One block times the activations from `start`: the sums over its QUANT_BLOCKs s of
/// `x_scale[s] * sum of (scale * sum_k(quant * x_quant))`, exact within s, and of `x_sum[s] * min`.
#[inline(always)]
fn multiply_block(w: &Unpacked, block_len: usize, x: &QuantisedRows, start: usize) -> (Lanes, Lanes) {
    let (mut products, mut mins) = ([0.0; LANES], [0.0; LANES]);
    for s in 0..block_len / QUANT_BLOCK {
        let mut total = [0; LANES];
        for half in 2 * s..2 * s + 2 {
            let mut sums = [0; LANES];
            for k in half * SUM_BLOCK..(half + 1) * SUM_BLOCK {
                for r in 0..LANES {
                    sums[r] += i32::from(w.quants[k][r]) * i32::from(x.quants[start + k]);
                }
            }
            for r in 0..LANES {
                total[r] += sums[r] * w.scales[half][r];
            }
        }
        let (x_scale, x_sum) = (x.scales[start / QUANT_BLOCK + s], x.sums[start / QUANT_BLOCK + s]);
        for r in 0..LANES {
            products[r] = x_scale.mul_add(total[r] as f32, products[r]);
            mins[r] = x_sum.mul_add(w.mins[2 * s][r] as f32, mins[r]);
        }
    }
    (products, mins)
}

#[inline(always)]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (math::sum_of_squares(x) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

#[inline(always)]
pub fn rotate_halves(head: &mut [f32], turns: &[f32], scale: f32) {
    let (cosines, sines) = turns.split_at(turns.len() / 2);
    let (a, rest) = head.split_at_mut(cosines.len());
    let (b, unturned) = rest.split_at_mut(cosines.len());
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cosines).zip(sines) {
        (*a, *b) = rotated(*a, *b, *cos, *sin, scale);
    }
    unturned.iter_mut().for_each(|v| *v *= scale);
}

#[inline(always)]
pub fn rotate_adjacent(head: &mut [f32], turns: &[f32], scale: f32) {
    let (cosines, sines) = turns.split_at(turns.len() / 2);
    let (turned, unturned) = head.split_at_mut(turns.len());
    for ((pair, cos), sin) in turned.as_chunks_mut::<2>().0.iter_mut().zip(cosines).zip(sines) {
        (pair[0], pair[1]) = rotated(pair[0], pair[1], *cos, *sin, scale);
    }
    unturned.iter_mut().for_each(|v| *v *= scale);
}

#[inline(always)]
fn rotated(x: f32, y: f32, cos: f32, sin: f32, scale: f32) -> (f32, f32) {
    (x.mul_add(cos, -(y * sin)) * scale, x.mul_add(sin, y * cos) * scale)
}

#[inline(always)]
pub fn gate_silu(gate: &[f32], x: &mut [f32]) {
    for (g, x) in gate.iter().zip(x) {
        *x *= g * math::sigmoid(*g);
    }
}

#[inline(always)]
pub fn gate_gelu(gate: &[f32], x: &mut [f32]) {
    // g / 2 * (1 + tanh(y)) = g * sigmoid(2y), y = sqrt(2 / pi) * (g + 0.044715 g^3)
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
    for (g, x) in gate.iter().zip(x) {
        let inner = TWICE_SQRT_2_OVER_PI * (0.044_715 * g * g).mul_add(*g, *g);
        *x *= g * math::sigmoid(inner);
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
