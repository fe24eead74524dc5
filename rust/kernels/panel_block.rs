//! Panel blocks of each quantised type, unpacked to plain integers: what the scalar kernel multiplies, and the
//! definition that the vector kernels follow.

use super::math::{LANES, Lanes};
use super::scalar::{GROUP, QUANT_BLOCK};
use crate::quant::DType;
use half::f16;

const SUB_BLOCKS: usize = GROUP / QUANT_BLOCK;

/// One block of PANEL rows. Weight k of row r, in sub-block s = k / QUANT_BLOCK, is
/// `d[r] * scales[s][r] * quants[k][r] - m[r] * mins[s][r]`.
pub struct PanelBlock {
    /// As stored, so not negative but for Q8_0.
    pub quants: [[i16; LANES]; GROUP],
    /// The integer scale within the block.
    pub scales: [[i32; LANES]; SUB_BLOCKS],
    /// The integer minimum within the block.
    pub mins: [Lanes; SUB_BLOCKS],
    /// Scale of the block.
    pub d: Lanes,
    /// Scale of its minimums; formats with centred quants get theirs from `d`.
    pub m: Lanes,
    /// Sub-blocks in use.
    pub n_sub_blocks: usize,
    /// Whether minimums count.
    pub has_min: bool,
}

impl PanelBlock {
    /// Room for any type.
    #[inline(always)]
    pub fn new() -> Self {
        Self {
            quants: [[0; LANES]; GROUP],
            scales: [[1; LANES]; SUB_BLOCKS],
            mins: [[1.0; LANES]; SUB_BLOCKS],
            d: [0.0; LANES],
            m: [0.0; LANES],
            n_sub_blocks: 0,
            has_min: false,
        }
    }

    /// Unpacks a panel block of `dtype`; all blocks of one PanelBlock are of the same type.
    #[inline(always)]
    pub fn unpack(&mut self, dtype: DType, bytes: &[u8]) {
        self.n_sub_blocks = dtype.block_len() / QUANT_BLOCK;
        self.has_min = dtype != DType::Q8_0;
        self.d = halves(bytes, 0);
        match dtype {
            DType::Q4_0 => {
                self.m = self.d.map(|d| 8.0 * d);
                self.nibbles_of_32(&bytes[32..]);
            }
            DType::Q4_1 => {
                self.m = halves(bytes, 32).map(|m| -m);
                self.nibbles_of_32(&bytes[64..]);
            }
            DType::Q5_0 => {
                self.m = self.d.map(|d| 16.0 * d);
                self.nibbles_of_32(&bytes[96..]);
                self.fifth_bits_of_32(&bytes[32..]);
            }
            DType::Q5_1 => {
                self.m = halves(bytes, 32).map(|m| -m);
                self.nibbles_of_32(&bytes[128..]);
                self.fifth_bits_of_32(&bytes[64..]);
            }
            DType::Q8_0 => self.set_quants(32, |k, r| i16::from(bytes[32 + unit(k, r)] as i8)),
            DType::Q4_K => {
                self.m = halves(bytes, 32);
                self.six_bit_scales(&bytes[64..]);
                self.set_quants(256, |k, r| nibble_of_256(&bytes[256..], k, r));
            }
            DType::Q5_K => {
                self.m = halves(bytes, 32);
                self.six_bit_scales(&bytes[64..]);
                self.set_quants(256, |k, r| {
                    let fifth = bytes[256 + unit(k % 32, r)] >> (k / 32) & 1;
                    nibble_of_256(&bytes[768..], k, r) | i16::from(fifth) << 4
                });
            }
            DType::Q6_K => {
                self.m = self.d.map(|d| 32.0 * d);
                for (s, scales) in bytes[32..288].as_chunks::<LANES>().0.iter().enumerate() {
                    self.scales[s] = scales.map(|scale| i32::from(scale as i8));
                    self.mins[s] = scales.map(|scale| f32::from(scale as i8));
                }
                self.set_quants(256, |k, r| {
                    // Per 128 columns 24 units: high bits and nibbles by turns of 4, then 8 more of nibbles.
                    let (quarter, i) = (k % 128 / 32, k % 32);
                    let units = &bytes[288 + k / 128 * 24 * 4 * LANES..];
                    let turn = i / 16 * 8;
                    let low = if quarter % 2 == 0 { unit(4 * (turn + 4) + i % 16, r) } else { unit(4 * 16 + i, r) };
                    let low = units[low] >> (4 * (quarter / 2)) & 15;
                    let high = units[unit(4 * turn + i % 16, r)] >> (2 * quarter) & 3;
                    i16::from(low | high << 4)
                });
            }
            DType::F32 | DType::F16 | DType::BF16 => panic!("{} has no quants", dtype.name()),
        }
    }

    #[inline(always)]
    fn set_quants(&mut self, n: usize, quant: impl Fn(usize, usize) -> i16) {
        for (k, lanes) in self.quants[..n].iter_mut().enumerate() {
            *lanes = std::array::from_fn(|r| quant(k, r));
        }
    }

    /// Blocks of 32: the low nibble of byte i is weight i, the high one weight 16 + i.
    #[inline(always)]
    fn nibbles_of_32(&mut self, qs: &[u8]) {
        self.set_quants(32, |k, r| i16::from(qs[unit(k % 16, r)] >> (4 * (k / 16)) & 15));
    }

    /// Weight k's bit is bit k / 4 of its byte.
    #[inline(always)]
    fn fifth_bits_of_32(&mut self, qh: &[u8]) {
        for (k, lanes) in self.quants[..32].iter_mut().enumerate() {
            for r in 0..LANES {
                lanes[r] |= i16::from(qh[unit(k % 4, r)] >> (k / 4) & 1) << 4;
            }
        }
    }

    /// Q4_K and Q5_K: eight scales and minimums of 6 bits in 12 bytes, as `quant::blocks` describes.
    #[inline(always)]
    fn six_bit_scales(&mut self, packed: &[u8]) {
        for r in 0..LANES {
            let byte = |i: usize| packed[i * LANES + r];
            for j in 0..4 {
                let (s, m, both) = (byte(j), byte(4 + j), byte(8 + j));
                let scales = [(j, s & 63, m & 63), (4 + j, (both & 15) | s >> 6 << 4, both >> 4 | m >> 6 << 4)];
                for (block, scale, min) in scales {
                    for s in [2 * block, 2 * block + 1] {
                        self.scales[s][r] = i32::from(scale);
                        self.mins[s][r] = f32::from(min);
                    }
                }
            }
        }
    }
}

/// Place of byte i of row r in a field whose units are four bytes.
#[inline(always)]
fn unit(i: usize, r: usize) -> usize {
    i / 4 * 4 * LANES + 4 * r + i % 4
}

/// Blocks of 256: each 32 bytes hold 64 weights, the low nibbles the first 32.
#[inline(always)]
fn nibble_of_256(qs: &[u8], k: usize, r: usize) -> i16 {
    i16::from(qs[unit(k / 64 * 32 + k % 32, r)] >> (k % 64 / 32 * 4) & 15)
}

/// The rows' f16 at `at`.
#[inline(always)]
fn halves(bytes: &[u8], at: usize) -> Lanes {
    std::array::from_fn(|r| f16::from_le_bytes([bytes[at + 2 * r], bytes[at + 2 * r + 1]]).to_f32())
}
