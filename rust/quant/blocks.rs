//! Block formats: from the bytes of a file to small integers with scales, and from those to f32.
//!
//! Every quantised type says the same thing of 16 consecutive weights: `weight = scale * quant - min`. So there is one
//! `unpack` per type, and both the decoding to f32 and the integer dot products start from it.
//!
//! Everything here is inlined into the caller and has fixed trip counts, so that a caller compiled for an instruction
//! set gets vector code for it. The order of the multiplications is that of the formats' reference implementation, and
//! nothing is fused, so a weight has the same bits everywhere.

use std::iter::zip;

use super::DType;

/// Consecutive weights of one row, up to 256: `weight[i] = scales[i / 16] * quants[i] - mins[i / 16]`.
#[derive(Debug, Clone)]
pub struct Unpacked {
    /// The integers: centred where the format is symmetric, else from 0 to 15 or 31.
    pub quants: [i8; 256],
    /// Scale of each 16 weights.
    pub scales: [f32; 16],
    /// What is taken off each 16 weights; 0 for symmetric formats.
    pub mins: [f32; 16],
}

impl Default for Unpacked {
    fn default() -> Self {
        Self { quants: [0; 256], scales: [0.0; 16], mins: [0.0; 16] }
    }
}

/// Unpacks the weights that `bytes` (whole blocks of a quantised type) hold and returns how many they are, at most 256.
/// What lies behind them in `out` stays as it was.
///
/// # Panics
/// When the type is F32, F16 or BF16, or when `bytes` are not whole blocks of at most 256 weights.
#[inline(always)]
pub fn unpack(dtype: DType, bytes: &[u8], out: &mut Unpacked) -> usize {
    match dtype {
        DType::Q4_0 => unpack_blocks::<BlockQ4_0, 32, 2>(bytes, out),
        DType::Q4_1 => unpack_blocks::<BlockQ4_1, 32, 2>(bytes, out),
        DType::Q5_0 => unpack_blocks::<BlockQ5_0, 32, 2>(bytes, out),
        DType::Q5_1 => unpack_blocks::<BlockQ5_1, 32, 2>(bytes, out),
        DType::Q8_0 => unpack_blocks::<BlockQ8_0, 32, 2>(bytes, out),
        DType::Q4_K => unpack_blocks::<BlockQ4K, 256, 16>(bytes, out),
        DType::Q5_K => unpack_blocks::<BlockQ5K, 256, 16>(bytes, out),
        DType::Q6_K => unpack_blocks::<BlockQ6K, 256, 16>(bytes, out),
        DType::F32 | DType::F16 | DType::BF16 => panic!("{} has no quants to unpack", dtype.name()),
    }
}

/// Decodes whole blocks of any type to f32.
///
/// # Panics
/// When `bytes` do not hold exactly `out.len()` weights.
#[inline(always)]
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "bytes of {} weights of {}", out.len(), dtype.name());
    match dtype {
        DType::F32 => decode_each(bytes, out, f32::from_le_bytes),
        DType::F16 => decode_each(bytes, out, f16_to_f32),
        DType::BF16 => decode_each(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
        _ => decode_quantised(dtype, bytes, out),
    }
}

#[inline(always)]
fn decode_each<const SIZE: usize>(bytes: &[u8], out: &mut [f32], to_f32: impl Fn([u8; SIZE]) -> f32) {
    for (weight, bytes) in zip(out, bytes.as_chunks().0) {
        *weight = to_f32(*bytes);
    }
}

#[inline(always)]
fn decode_quantised(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let group_bytes = 256 / dtype.block_len() * dtype.block_bytes();
    let mut unpacked = Unpacked::default();
    for (out, bytes) in zip(out.chunks_mut(256), bytes.chunks(group_bytes)) {
        unpack(dtype, bytes, &mut unpacked);
        let (quants, scales, mins) = (unpacked.quants.as_chunks::<16>().0, &unpacked.scales, &unpacked.mins);
        for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            for (weight, &quant) in zip(out, &quants[i]) {
                *weight = scales[i] * f32::from(quant) - mins[i];
            }
        }
    }
}

/// The f32 of a little-endian f16. Unlike a conversion instruction that is looked up at run time it vectorises on every
/// CPU, and no step has a subnormal operand, so it does not depend on the thread's flush-to-zero mode.
#[inline(always)]
pub fn f16_to_f32(bytes: [u8; 2]) -> f32 {
    const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;
    let half = u32::from(u16::from_le_bytes(bytes));
    let (sign, magnitude) = ((half & 0x8000) << 16, (half & 0x7fff) << 13);
    // The exponent's bias grows by 112; that of infinities and NaNs, which must stay all ones, by another 112.
    let bias = if magnitude < 31 << 23 { 112 << 23 } else { 224 << 23 };
    let normal = magnitude + bias;
    // A subnormal has no leading one: read as if it had, then subtract it.
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - SMALLEST_NORMAL).to_bits();
    f32::from_bits(sign | if magnitude < 1 << 23 { subnormal } else { normal })
}

/// A block of `LEN` weights as it lies in a file, with a scale and a min per 16 weights (`GROUPS` of them).
///
/// # Safety
/// The type must have alignment 1, no padding, and be valid whatever its bytes are.
unsafe trait Block<const LEN: usize, const GROUPS: usize>: Sized {
    fn unpack(&self, quants: &mut [i8; LEN], scales: &mut [f32; GROUPS], mins: &mut [f32; GROUPS]);
}

#[inline(always)]
fn unpack_blocks<B: Block<LEN, GROUPS>, const LEN: usize, const GROUPS: usize>(
    bytes: &[u8],
    out: &mut Unpacked,
) -> usize {
    const { assert!(align_of::<B>() == 1 && LEN == 16 * GROUPS) };
    let n_blocks = bytes.len() / size_of::<B>();
    assert!(bytes.len() == n_blocks * size_of::<B>() && n_blocks <= 256 / LEN, "whole blocks of at most 256 weights");
    // SAFETY: the slice spans the same bytes, B has alignment 1 and is valid for any bytes (contract of Block).
    let blocks = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<B>(), n_blocks) };
    let quants = out.quants.as_chunks_mut().0;
    let scales = out.scales.as_chunks_mut().0;
    let mins = out.mins.as_chunks_mut().0;
    for (((block, quants), scales), mins) in zip(zip(zip(blocks, quants), scales), mins) {
        block.unpack(quants, scales, mins);
    }
    n_blocks * LEN
}

/// 32 weights `d * (q - 8)`. Weight j < 16 is the low nibble of `qs[j]`, weight 16 + j the high one.
#[repr(C)]
struct BlockQ4_0 {
    d: [u8; 2],
    qs: [u8; 16],
}
const _: () = assert!(size_of::<BlockQ4_0>() == 18);

// SAFETY: byte arrays only.
unsafe impl Block<32, 2> for BlockQ4_0 {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 32], scales: &mut [f32; 2], mins: &mut [f32; 2]) {
        nibbles(&self.qs, 8, quants);
        *scales = [f16_to_f32(self.d); 2];
        *mins = [0.0; 2];
    }
}

/// 32 weights `d * q + m`. Nibbles as in Q4_0.
#[repr(C)]
struct BlockQ4_1 {
    d: [u8; 2],
    m: [u8; 2],
    qs: [u8; 16],
}
const _: () = assert!(size_of::<BlockQ4_1>() == 20);

// SAFETY: byte arrays only.
unsafe impl Block<32, 2> for BlockQ4_1 {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 32], scales: &mut [f32; 2], mins: &mut [f32; 2]) {
        nibbles(&self.qs, 0, quants);
        *scales = [f16_to_f32(self.d); 2];
        *mins = [-f16_to_f32(self.m); 2];
    }
}

/// 32 weights `d * (q - 16)`. Nibbles as in Q4_0; bit j of `qh` (little-endian) is the fifth bit of weight j.
#[repr(C)]
struct BlockQ5_0 {
    d: [u8; 2],
    qh: [u8; 4],
    qs: [u8; 16],
}
const _: () = assert!(size_of::<BlockQ5_0>() == 22);

// SAFETY: byte arrays only.
unsafe impl Block<32, 2> for BlockQ5_0 {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 32], scales: &mut [f32; 2], mins: &mut [f32; 2]) {
        nibbles(&self.qs, 16, quants);
        add_fifth_bits(&self.qh, quants);
        *scales = [f16_to_f32(self.d); 2];
        *mins = [0.0; 2];
    }
}

/// 32 weights `d * q + m`. Nibbles as in Q4_0, fifth bits as in Q5_0.
#[repr(C)]
struct BlockQ5_1 {
    d: [u8; 2],
    m: [u8; 2],
    qh: [u8; 4],
    qs: [u8; 16],
}
const _: () = assert!(size_of::<BlockQ5_1>() == 24);

// SAFETY: byte arrays only.
unsafe impl Block<32, 2> for BlockQ5_1 {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 32], scales: &mut [f32; 2], mins: &mut [f32; 2]) {
        nibbles(&self.qs, 0, quants);
        add_fifth_bits(&self.qh, quants);
        *scales = [f16_to_f32(self.d); 2];
        *mins = [-f16_to_f32(self.m); 2];
    }
}

/// 32 weights `d * q`.
#[repr(C)]
struct BlockQ8_0 {
    d: [u8; 2],
    qs: [i8; 32],
}
const _: () = assert!(size_of::<BlockQ8_0>() == 34);

// SAFETY: byte arrays only.
unsafe impl Block<32, 2> for BlockQ8_0 {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 32], scales: &mut [f32; 2], mins: &mut [f32; 2]) {
        *quants = self.qs;
        *scales = [f16_to_f32(self.d); 2];
        *mins = [0.0; 2];
    }
}

/// 256 weights `d * scale * q - dmin * min`, with a 6-bit scale and min per 32 weights (see `scales_and_mins`).
/// Each 32 bytes of `qs` hold 64 weights: the low nibbles are the first 32, the high ones the rest.
#[repr(C)]
struct BlockQ4K {
    d: [u8; 2],
    dmin: [u8; 2],
    scales: [u8; 12],
    qs: [u8; 128],
}
const _: () = assert!(size_of::<BlockQ4K>() == 144);

// SAFETY: byte arrays only.
unsafe impl Block<256, 16> for BlockQ4K {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 256], scales: &mut [f32; 16], mins: &mut [f32; 16]) {
        for (quants, qs) in zip(quants.as_chunks_mut::<64>().0, self.qs.as_chunks::<32>().0) {
            let (low, high) = quants.split_at_mut(32);
            // Eight bytes at a time: byte by byte the compiler does not find the vectors here.
            for (i, eight) in qs.as_chunks::<8>().0.iter().enumerate() {
                let word = u64::from_le_bytes(*eight);
                low[8 * i..][..8].copy_from_slice(&(word & LOW_NIBBLES).to_le_bytes().map(|q| q as i8));
                high[8 * i..][..8].copy_from_slice(&(word >> 4 & LOW_NIBBLES).to_le_bytes().map(|q| q as i8));
            }
        }
        scales_and_mins(&self.scales, f16_to_f32(self.d), f16_to_f32(self.dmin), scales, mins);
    }
}

/// 256 weights as Q4_K; bit i of `qh[j]` is the fifth bit of weight 32 i + j.
#[repr(C)]
struct BlockQ5K {
    d: [u8; 2],
    dmin: [u8; 2],
    scales: [u8; 12],
    qh: [u8; 32],
    qs: [u8; 128],
}
const _: () = assert!(size_of::<BlockQ5K>() == 176);

// SAFETY: byte arrays only.
unsafe impl Block<256, 16> for BlockQ5K {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 256], scales: &mut [f32; 16], mins: &mut [f32; 16]) {
        for (i, (quants, qs)) in zip(quants.as_chunks_mut::<64>().0, self.qs.as_chunks::<32>().0).enumerate() {
            for j in 0..32 {
                let high = self.qh[j] >> (2 * i);
                quants[j] = ((qs[j] & 15) | (high & 1) << 4) as i8;
                quants[32 + j] = ((qs[j] >> 4) | (high & 2) << 3) as i8;
            }
        }
        scales_and_mins(&self.scales, f16_to_f32(self.d), f16_to_f32(self.dmin), scales, mins);
    }
}

/// 256 weights `d * scale * (q - 32)`, with an 8-bit scale per 16 weights.
/// Each 64 bytes of `ql` and 32 bytes of `qh` hold 128 weights. Of the four 32 among these, the first two have their
/// low four bits in the low nibbles of `ql`, the other two in the high ones, and all four two bits each in `qh`.
#[repr(C)]
struct BlockQ6K {
    ql: [u8; 128],
    qh: [u8; 64],
    scales: [i8; 16],
    d: [u8; 2],
}
const _: () = assert!(size_of::<BlockQ6K>() == 210);

// SAFETY: byte arrays only.
unsafe impl Block<256, 16> for BlockQ6K {
    #[inline(always)]
    fn unpack(&self, quants: &mut [i8; 256], scales: &mut [f32; 16], mins: &mut [f32; 16]) {
        let halves = zip(self.ql.as_chunks::<64>().0, self.qh.as_chunks::<32>().0);
        for (quants, (ql, qh)) in zip(quants.as_chunks_mut::<128>().0, halves) {
            for j in 0..32 {
                quants[j] = ((ql[j] & 15) | (qh[j] & 0x03) << 4) as i8 - 32;
                quants[32 + j] = ((ql[32 + j] & 15) | (qh[j] & 0x0c) << 2) as i8 - 32;
                quants[64 + j] = ((ql[j] >> 4) | (qh[j] & 0x30)) as i8 - 32;
                quants[96 + j] = ((ql[32 + j] >> 4) | (qh[j] & 0xc0) >> 2) as i8 - 32;
            }
        }
        let d = f16_to_f32(self.d);
        *scales = self.scales.map(|scale| d * f32::from(scale));
        *mins = [0.0; 16];
    }
}

/// Selects the low nibble of each of eight bytes.
const LOW_NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// The low nibbles of 16 bytes, then the high ones, less `offset`.
#[inline(always)]
fn nibbles(qs: &[u8; 16], offset: i8, quants: &mut [i8; 32]) {
    for j in 0..16 {
        quants[j] = (qs[j] & 15) as i8 - offset;
    }
    for j in 0..16 {
        quants[16 + j] = (qs[j] >> 4) as i8 - offset;
    }
}

/// Adds 16 where the bit of `qh` is set.
#[inline(always)]
fn add_fifth_bits(qh: &[u8; 4], quants: &mut [i8; 32]) {
    for j in 0..32 {
        quants[j] += if qh[j / 8] & 1 << (j % 8) != 0 { 16 } else { 0 };
    }
}

/// The scales and mins of Q4_K and Q5_K: eight of 6 bits each, in 12 bytes. The low six bits of bytes 0-3 are scales
/// 0-3, those of bytes 4-7 mins 0-3; bytes 8-11 hold the low four bits of scales 4-7 (low nibbles) and mins 4-7 (high
/// nibbles), whose upper two are the top bits of bytes 0-3 and 4-7.
#[inline(always)]
fn scales_and_mins(packed: &[u8; 12], d: f32, dmin: f32, scales: &mut [f32; 16], mins: &mut [f32; 16]) {
    for j in 0..4 {
        let (s, m, both) = (packed[j], packed[4 + j], packed[8 + j]);
        let scale = [s & 63, (both & 15) | (s >> 6) << 4].map(|scale| d * f32::from(scale));
        let min = [m & 63, (both >> 4) | (m >> 6) << 4].map(|min| dmin * f32::from(min));
        for (i, first) in [2 * j, 8 + 2 * j].into_iter().enumerate() {
            scales[first..first + 2].fill(scale[i]);
            mins[first..first + 2].fill(min[i]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The f16 1.5 and -0.25, little-endian.
    const D: [u8; 2] = [0x00, 0x3e];
    const M: [u8; 2] = [0x00, 0xb4];

    fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
        decode(dtype, bytes, &mut out);
        out
    }

    #[test]
    fn every_f16_converts_as_in_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits.to_le_bytes()), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#06x}: {ours}");
        }
    }

    #[test]
    fn q4_1_and_q5_1_by_hand() {
        let mut qs = [0x00; 16];
        qs[3] = 0x2f; // weight 3: 15, weight 19: 2
        let q4_1 = decoded(DType::Q4_1, &[&D[..], &M, &qs].concat());
        assert_eq!((q4_1[0], q4_1[3], q4_1[19]), (-0.25, 1.5 * 15.0 - 0.25, 1.5 * 2.0 - 0.25));
        // Fifth bits of weights 19 and 31.
        let q5_1 = decoded(DType::Q5_1, &[&D[..], &M, &[0, 0, 0x08, 0x80], &qs].concat());
        assert_eq!((q5_1[0], q5_1[3], q5_1[18]), (-0.25, 22.25, -0.25));
        assert_eq!((q5_1[19], q5_1[31]), (1.5 * 18.0 - 0.25, 1.5 * 16.0 - 0.25));
    }

    #[test]
    fn q4_k_by_hand() {
        let (mut scales, mut qs) = ([0; 12], [0; 128]);
        scales[0] = 63 | 0b10 << 6; // scale 0: 63, top bits of scale 4
        scales[4] = 1; // min 0: 1
        scales[8] = 0x5a; // scale 4: 0b101010, min 4: 5
        qs[0] = 0x07; // weight 0: 7
        qs[64 + 31] = 0x3c; // weight 128 + 31: 12; weight 128 + 32 + 31: 3, whose scale is 0
        let block = [&D[..], &M, &scales, &qs].concat();
        let weights = decoded(DType::Q4_K, &block);
        assert_eq!((weights[0], weights[1]), (1.5 * 63.0 * 7.0 + 0.25, 0.25));
        assert_eq!((weights[159], weights[158]), (1.5 * 42.0 * 12.0 + 0.25 * 5.0, 0.25 * 5.0));
        assert_eq!(weights[191], 0.0);

        // Q5_K: the same, and the fifth bits of weights 31 + 32 i for even i.
        let mut qh = [0; 32];
        qh[31] = 0b0101_0101;
        let block = [&D[..], &M, &scales, &qh, &qs].concat();
        let weights = decoded(DType::Q5_K, &block);
        assert_eq!((weights[31], weights[159]), (1.5 * 63.0 * 16.0 + 0.25, 1.5 * 42.0 * 28.0 + 0.25 * 5.0));
    }

    #[test]
    fn q6_k_by_hand() {
        let (mut ql, mut qh, mut scales) = ([0; 128], [0; 64], [1; 16]);
        ql[64 + 32 + 1] = 0x9a; // weights 128 + 32 + 1 and 128 + 96 + 1
        qh[32 + 1] = 0b11_00_01_00;
        scales[10] = -128i8 as u8;
        let weights = decoded(DType::Q6_K, &[&ql[..], &qh, &scales, &D].concat());
        assert_eq!((weights[0], weights[161]), (1.5 * -32.0, 1.5 * -128.0 * (26.0 - 32.0)));
        assert_eq!(weights[225], 1.5 * (57.0 - 32.0));
    }

    #[test]
    fn unpack_fills_only_what_the_bytes_hold() {
        let mut out = Unpacked { quants: [99; 256], scales: [9.0; 16], mins: [9.0; 16] };
        let block = [&D[..], &[0xf0; 16]].concat();
        assert_eq!(unpack(DType::Q4_0, &block.repeat(2), &mut out), 64);
        assert_eq!(out.quants[..32], [[-8; 16], [7; 16]].concat());
        assert_eq!((out.quants[63], out.quants[64]), (7, 99));
        assert_eq!((out.scales[3], out.scales[4], out.mins[3], out.mins[4]), (1.5, 9.0, 0.0, 9.0));
    }

    #[test]
    fn float_types() {
        assert_eq!(decoded(DType::F16, &[D, M].concat()), [1.5, -0.25]);
        assert_eq!(decoded(DType::BF16, &[0xc0, 0x3f, 0x80, 0xbe]), [1.5, -0.25]);
        assert_eq!(decoded(DType::F32, &1e-42f32.to_le_bytes()), [1e-42]);
    }

    #[test]
    #[should_panic(expected = "bytes of 64 weights of Q4_0")]
    fn lengths_that_disagree() {
        decode(DType::Q4_0, &[0; 18], &mut [0.0; 64]);
    }

    #[test]
    #[should_panic(expected = "whole blocks of at most 256 weights")]
    fn more_than_256_weights() {
        unpack(DType::Q8_0, &[0; 34 * 9], &mut Unpacked::default());
    }
}
