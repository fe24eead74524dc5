//! What the bytes of a quantised panel block mean: the definition that all integer kernels follow.
//!
//! Weight k of row r is `d[r] * scale(k)[r] * quant(k)[r] - m[r] * min(k)[r]`, where d and m belong to the block, scale and
//! min are integers that 32 (Q6_K: 16) columns share, and quants are centred in formats without minimums.

#![allow(clippy::needless_range_loop)] // loops over lanes read best by index

use super::int8::{Apart, N_APART};
use super::math::{LANES, Lanes};
use crate::pack::PANEL;
use crate::quant::DType;
use crate::quant::blocks::f16_to_f32;

const _: () = assert!(LANES == PANEL, "lanes are rows of a panel");

/// Some times PANEL consecutive rows of a weight matrix, packed as `pack` describes.
#[derive(Clone, Copy)]
pub struct Panels<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Columns.
    pub cols: usize,
    /// Panels, one after the other; each has a panel block for each block of a row.
    pub bytes: &'a [u8],
}

impl<'a> Panels<'a> {
    /// How many panels there are.
    #[inline(always)]
    pub fn n_panels(&self) -> usize {
        self.bytes.len() / self.panel_bytes()
    }

    /// Panel i alone.
    #[inline(always)]
    pub fn one(&self, i: usize) -> Self {
        Self { bytes: &self.bytes[i * self.panel_bytes()..][..self.panel_bytes()], ..*self }
    }

    /// Bytes of a panel block.
    #[inline(always)]
    pub fn block_bytes(&self) -> usize {
        PANEL * self.dtype.block_bytes()
    }

    /// Panel block i of the first panel.
    #[inline(always)]
    pub fn block(&self, i: usize) -> &'a [u8] {
        &self.bytes[i * self.block_bytes()..][..self.block_bytes()]
    }

    #[inline(always)]
    fn panel_bytes(&self) -> usize {
        self.cols / self.dtype.block_len() * self.block_bytes()
    }
}

/// Integers, one for each row.
pub type Integers = [i32; LANES];

/// Changes one array in a loop over its lanes. The array functions of the standard library are not always inlined, and
/// then are not compiled for the caller's instruction set.
#[inline(always)]
fn each<T>(change: impl Fn(usize, &mut [T; LANES]), mut lanes: [T; LANES]) -> [T; LANES] {
    for r in 0..LANES {
        change(r, &mut lanes);
    }
    lanes
}

/// Whether a format has minimums.
#[inline(always)]
pub fn has_min(dtype: DType) -> bool {
    matches!(dtype, DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K)
}

/// Each row's quant k.
#[inline(always)]
pub fn quant(dtype: DType, block: &[u8], k: usize) -> Integers {
    match dtype {
        DType::Q4_0 => each(|r, q| q[r] -= 8, nibble_of_32(&block[32..], k)),
        DType::Q4_1 => nibble_of_32(&block[64..], k),
        DType::Q5_0 => each(|r, q| q[r] -= 16, with_fifth_of_32(nibble_of_32(&block[96..], k), &block[32..], k)),
        DType::Q5_1 => with_fifth_of_32(nibble_of_32(&block[128..], k), &block[64..], k),
        DType::Q8_0 => each(|r, q| q[r] = i32::from(q[r] as i8), bits(&block[32..], k, 0, 255)),
        DType::Q4_K => nibble_of_256(&block[256..], k),
        DType::Q5_K => with_fifth(nibble_of_256(&block[768..], k), &block[256..], k % 32, k / 32),
        DType::Q6_K => {
            // Per 128 columns 24 units: high bits and nibbles by turns of 4, then 8 more of nibbles.
            let (quarter, i) = (k % 128 / 32, k % 32);
            let units = &block[288 + k / 128 * 24 * 4 * LANES..];
            let turn = i / 16 * 8;
            let low = if quarter % 2 == 0 { 4 * (turn + 4) + i % 16 } else { 4 * 16 + i };
            let low = bits(units, low, 4 * (quarter / 2), 15);
            let high = bits(units, 4 * turn + i % 16, 2 * quarter, 3);
            each(|r, q| q[r] = (q[r] | high[r] << 4) - 32, low)
        }
        DType::F32 | DType::F16 | DType::BF16 => panic!("{} has no quants", dtype.name()),
    }
}

/// Each row's integer scale of column k.
#[inline(always)]
pub fn scale(dtype: DType, block: &[u8], k: usize) -> Integers {
    match dtype {
        DType::Q4_K | DType::Q5_K => six_bits(&block[64..], k / 32, 0),
        DType::Q6_K => each(|r, scale| scale[r] = i32::from(scale[r] as i8), bytes(&block[32..], k / 16)),
        _ => [1; LANES],
    }
}

/// Each row's integer minimum of column k; 1 in formats whose minimums belong to the block alone.
#[inline(always)]
pub fn min(dtype: DType, block: &[u8], k: usize) -> Integers {
    match dtype {
        DType::Q4_K | DType::Q5_K => six_bits(&block[64..], k / 32, 1),
        _ => [1; LANES],
    }
}

/// The rows' d.
#[inline(always)]
pub fn d(block: &[u8]) -> Lanes {
    halves(block)
}

/// The rows' m: what a minimum takes off, so that formats which store what is added change its sign.
#[inline(always)]
pub fn m(dtype: DType, block: &[u8]) -> Lanes {
    let stored = halves(&block[2 * LANES..]);
    if matches!(dtype, DType::Q4_1 | DType::Q5_1) { each(|r, m| m[r] = -m[r], stored) } else { stored }
}

/// One column of a panel, ready to be multiplied by an activation.
struct Column {
    products: Lanes,
    mins: Lanes,
    d: Lanes,
    m: Lanes,
}

impl Column {
    #[inline(always)]
    fn new(w: &Panels, index: usize) -> Self {
        let (block, k) = (w.block(index / w.dtype.block_len()), index % w.dtype.block_len());
        let (quants, scales) = (quant(w.dtype, block, k), scale(w.dtype, block, k));
        let mut column = Self { products: [0.0; LANES], mins: [0.0; LANES], d: d(block), m: [0.0; LANES] };
        for r in 0..LANES {
            column.products[r] = (quants[r] * scales[r]) as f32;
        }
        if has_min(w.dtype) {
            let mins = min(w.dtype, block, k);
            column.mins = each(|r, lanes| lanes[r] = mins[r] as f32, column.mins);
            column.m = m(w.dtype, block);
        }
        column
    }
}

/// `out[c]` += one panel's columns times the activations of column c that stand apart, in their order.
#[inline(always)]
pub fn add_apart(w: &Panels, apart: &[[Apart; N_APART]], out: &mut [Lanes]) {
    // The same elements tend to be large in all columns.
    let mut last: [Option<(u32, Column)>; N_APART] = [const { None }; N_APART];
    for (acc, apart) in out.iter_mut().zip(apart) {
        for (last, Apart { index, value }) in last.iter_mut().zip(apart) {
            if last.as_ref().is_none_or(|(i, _)| i != index) {
                *last = Some((*index, Column::new(w, *index as usize)));
            }
            let Some((_, column)) = last else { unreachable!("set above") };
            *acc = each(|r, acc| acc[r] = column.d[r].mul_add(value * column.products[r], acc[r]), *acc);
            if has_min(w.dtype) {
                *acc = each(|r, acc| acc[r] = (-column.m[r]).mul_add(value * column.mins[r], acc[r]), *acc);
            }
        }
    }
}

/// Each row's byte i of a field whose units are four bytes, shifted and masked.
#[inline(always)]
fn bits(field: &[u8], i: usize, shift: usize, mask: i32) -> Integers {
    let rows = field[i / 4 * 4 * LANES..][..4 * LANES].as_chunks::<4>().0;
    each(|r, all| all[r] = i32::from_le_bytes(rows[r]) >> (8 * (i % 4) + shift) & mask, [0; LANES])
}

/// Each row's byte i of a field whose units are single bytes.
#[inline(always)]
fn bytes(field: &[u8], i: usize) -> Integers {
    let rows = &field[i * LANES..][..LANES];
    each(|r, all| all[r] = i32::from(rows[r]), [0; LANES])
}

/// Blocks of 32: the low nibble of byte i is weight i, the high one weight 16 + i.
#[inline(always)]
fn nibble_of_32(qs: &[u8], k: usize) -> Integers {
    bits(qs, k % 16, k / 16 * 4, 15)
}

/// Blocks of 256: each 32 bytes hold 64 weights, the low nibbles the first 32.
#[inline(always)]
fn nibble_of_256(qs: &[u8], k: usize) -> Integers {
    bits(qs, k / 64 * 32 + k % 32, k % 64 / 32 * 4, 15)
}

/// Adds bit `bit` of byte i as the fifth.
#[inline(always)]
fn with_fifth(nibbles: Integers, qh: &[u8], i: usize, bit: usize) -> Integers {
    let fifth = bits(qh, i, bit, 1);
    each(|r, nibbles| nibbles[r] |= fifth[r] << 4, nibbles)
}

/// Blocks of 32: weight k's bit is bit k / 4 of its byte.
#[inline(always)]
fn with_fifth_of_32(nibbles: Integers, qh: &[u8], k: usize) -> Integers {
    with_fifth(nibbles, qh, k % 4, k / 4)
}

/// Q4_K and Q5_K: eight scales and minimums of 6 bits in 12 bytes, as `quant::blocks` describes.
#[inline(always)]
fn six_bits(packed: &[u8], i: usize, which: usize) -> Integers {
    let own = bytes(packed, 4 * which + i % 4);
    if i < 4 {
        return each(|r, own| own[r] &= 63, own);
    }
    let both = bytes(packed, 4 + i);
    each(|r, own| own[r] = (both[r] >> (4 * which) & 15) | own[r] >> 6 << 4, own)
}

/// The rows' f16 at the start of `field`.
#[inline(always)]
fn halves(field: &[u8]) -> Lanes {
    let rows = field[..2 * LANES].as_chunks::<2>().0;
    each(|r, all| all[r] = f16_to_f32(rows[r]), [0.0; LANES])
}
