//! Products of packed, quantised weights with int8 activations, by AVX2.
//!
//! Per panel half (8 rows), sub-block s of QUANT_BLOCK columns and activation column c, as in `scalar::matmul_int8`:
//!
//! ```text
//! products += x_scale[s] * f32(sum over k of quant[k] * x_quant[k], times the block's integer scale[s])
//! mins     += x_sum[s] * min[s]
//! acc      += d * products - m * mins        at the end of each block
//! ```
//!
//! 1. A panel holds four consecutive quants of each row side by side, so one 32-byte load has the same columns of
//!    8 rows, one broadcast of four activations meets them all, and `vpmaddubsw` leaves two 16-bit sums per row.
//! 2. These are added in 16 bits as long as that cannot overflow, which depends on the quants' width: see `Quants`.
//! 3. `vpmaddwd` with the integer scale in both halves joins a row's two sums, scaled, in its 32-bit lane: exactly.
//! 4. Every row keeps its lane, so there are no horizontal sums, and the bits are those of the scalar kernel.
//! 5. Columns share the unpacked weights: N of them in one pass over the panel.

use super::scalar::{Panel, QUANT_BLOCK, QuantisedRows};
use super::{LANES, math::Lanes};
use crate::quant::DType;
use std::arch::x86_64::*;

/// Bytes of a panel's unit of four columns: four for each row.
const UNIT: usize = 4 * LANES;
/// How far ahead of the block in use memory is asked for, bytes.
const PREFETCH_DISTANCE: usize = 4096;

/// How one type's panel blocks are read. `step` and `SUB` name a sub-block: `step * SUBS_PER_STEP + SUB`.
trait Format {
    /// Columns of a block.
    const BLOCK_LEN: usize;
    /// Bytes of a panel block.
    const BLOCK_BYTES: usize;
    /// Sub-blocks that are told apart at compile time.
    const SUBS_PER_STEP: usize;
    /// Whether minimums count.
    const HAS_MIN: bool;
    /// How the quants are multiplied.
    const QUANTS: Quants;
    /// Integer scales and minimums of a block.
    type Scales;

    /// Reads the integer scales of a block.
    unsafe fn scales(block: *const u8) -> Self::Scales;
    /// Quants of four columns of a half's rows: unit G (0 to 3) of a sub-block.
    unsafe fn quants<const SUB: usize, const G: usize>(block: *const u8, step: usize, half: usize) -> __m256i;
    /// The sub-block's integer scale of each row, in both 16-bit halves of its lane.
    unsafe fn scale(scales: &Self::Scales, sub: usize, half: usize) -> __m256i;
    /// The sub-block's integer minimum of each row.
    unsafe fn min(scales: &Self::Scales, sub: usize, half: usize) -> __m256;
    /// The factor of a block's minimums; `d` is the block's scale.
    unsafe fn m(block: *const u8, half: usize, d: __m256) -> __m256;
}

/// How wide quants are, and so how many products fit into 16 bits; |x| <= 127.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quants {
    /// At most 31: eight products make at most 8 * 31 * 127 = 31,496.
    UpTo31,
    /// At most 63: four products make at most 4 * 63 * 127 = 32,004.
    UpTo63,
    /// From -128 to 127: two products make at most 2 * 128 * 127 = 32,512.
    Signed,
}

/// The next four activations of a column in every lane.
#[inline(always)]
unsafe fn four(x: *const i8) -> __m256i {
    // SAFETY: the caller's column has four more elements.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

/// Unsigned quants times four activations: two 16-bit sums for each row.
#[inline(always)]
unsafe fn product(w: __m256i, x: *const i8) -> __m256i {
    // SAFETY: the caller has AVX2, and four activations at `x`.
    unsafe { _mm256_maddubs_epi16(w, four(x)) }
}

/// Signed quants times four activations, scaled: |w| * (x with the sign of w); |-128| is 128 as an unsigned byte.
#[inline(always)]
unsafe fn signed_product(w: __m256i, x: *const i8, scale: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2, and four activations at `x`.
    unsafe {
        let signed = _mm256_sign_epi8(four(x), w);
        _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), signed), scale)
    }
}

/// The rows' scaled sums of one sub-block: quants `w` of four units with 16 activations from `x`.
//
// No closures here or below: they would not be compiled for the caller's instruction set.
#[inline(always)]
unsafe fn sub_block_sum(kind: Quants, w: [__m256i; 4], x: *const i8, scale: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2, and 16 activations at `x`.
    unsafe {
        match kind {
            Quants::UpTo31 => {
                let low = _mm256_add_epi16(product(w[0], x), product(w[1], x.add(4)));
                let high = _mm256_add_epi16(product(w[2], x.add(8)), product(w[3], x.add(12)));
                _mm256_madd_epi16(_mm256_add_epi16(low, high), scale)
            }
            Quants::UpTo63 => {
                let low = _mm256_add_epi16(product(w[0], x), product(w[1], x.add(4)));
                let high = _mm256_add_epi16(product(w[2], x.add(8)), product(w[3], x.add(12)));
                _mm256_add_epi32(_mm256_madd_epi16(low, scale), _mm256_madd_epi16(high, scale))
            }
            Quants::Signed => {
                let low = _mm256_add_epi32(signed_product(w[0], x, scale), signed_product(w[1], x.add(4), scale));
                let high =
                    _mm256_add_epi32(signed_product(w[2], x.add(8), scale), signed_product(w[3], x.add(12), scale));
                _mm256_add_epi32(low, high)
            }
        }
    }
}

/// Columns of one pass, from the first element of the block in use.
#[derive(Clone, Copy)]
struct Columns<const N: usize> {
    quants: [*const i8; N],
    scales: [*const f32; N],
    sums: [*const f32; N],
}

/// Asks for the part of memory ahead that answers to sub-block `s`, of `bytes` bytes; not for a whole block at once,
/// because a core can wait for few lines at a time.
#[inline(always)]
unsafe fn prefetch_part(block: *const u8, bytes: usize, s: usize) {
    for line in 0..bytes.div_ceil(64) {
        let ahead = block.wrapping_add(PREFETCH_DISTANCE + s * bytes + 64 * line);
        // SAFETY: SSE belongs to x86-64, and a prefetch of any address has no effect that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
    }
}

/// `acc[c][h]` += half `first_half + h` of a panel block times column c.
#[inline(always)]
unsafe fn multiply_block<F: Format, const N: usize, const H: usize>(
    block: *const u8,
    scales: &F::Scales,
    first_half: usize,
    x: &Columns<N>,
    acc: &mut [[__m256; H]; N],
) {
    // SAFETY: the caller has AVX2, FMA and F16C, a whole panel block, and a block of each column.
    unsafe {
        let (mut products, mut mins) = ([[_mm256_setzero_ps(); H]; N], [[_mm256_setzero_ps(); H]; N]);
        let n_steps = F::BLOCK_LEN / QUANT_BLOCK / F::SUBS_PER_STEP;
        for step in 0..n_steps {
            macro_rules! sub_block {
                ($sub:literal) => {
                    if $sub < F::SUBS_PER_STEP {
                        let s = step * F::SUBS_PER_STEP + $sub;
                        if first_half == 0 {
                            prefetch_part(block, F::BLOCK_BYTES / (F::BLOCK_LEN / QUANT_BLOCK), s);
                        }
                        for h in 0..H {
                            let half = first_half + h;
                            let w = [
                                F::quants::<$sub, 0>(block, step, half),
                                F::quants::<$sub, 1>(block, step, half),
                                F::quants::<$sub, 2>(block, step, half),
                                F::quants::<$sub, 3>(block, step, half),
                            ];
                            let scale = F::scale(scales, s, half);
                            for c in 0..N {
                                let sum = sub_block_sum(F::QUANTS, w, x.quants[c].add(s * QUANT_BLOCK), scale);
                                let x_scale = _mm256_broadcast_ss(&*x.scales[c].add(s));
                                products[c][h] = _mm256_fmadd_ps(x_scale, _mm256_cvtepi32_ps(sum), products[c][h]);
                            }
                            if F::HAS_MIN {
                                let min = F::min(scales, s, half);
                                for c in 0..N {
                                    let x_sum = _mm256_broadcast_ss(&*x.sums[c].add(s));
                                    mins[c][h] = _mm256_fmadd_ps(x_sum, min, mins[c][h]);
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
        for h in 0..H {
            let d = halves(block, first_half + h);
            for c in 0..N {
                acc[c][h] = _mm256_fmadd_ps(d, products[c][h], acc[c][h]);
            }
            if F::HAS_MIN {
                let m = F::m(block, first_half + h, d);
                for c in 0..N {
                    acc[c][h] = _mm256_fnmadd_ps(m, mins[c][h], acc[c][h]);
                }
            }
        }
    }
}

/// `out[c]` = a panel times column `first + c`.
#[inline(always)]
unsafe fn multiply_panel<F: Format, const N: usize>(w: &Panel, x: &QuantisedRows, first: usize, out: &mut [Lanes]) {
    let out: &mut [Lanes; N] = out.first_chunk_mut().expect("N columns");
    let column = |c: usize| (first + c) * x.stride;
    let mut columns = Columns {
        quants: std::array::from_fn(|c| x.quants[column(c)..column(c) + x.stride].as_ptr()),
        scales: std::array::from_fn(|c| x.scales[column(c) / QUANT_BLOCK..][..x.stride / QUANT_BLOCK].as_ptr()),
        sums: std::array::from_fn(|c| x.sums[column(c) / QUANT_BLOCK..][..x.stride / QUANT_BLOCK].as_ptr()),
    };
    assert!(w.bytes.len() / F::BLOCK_BYTES * F::BLOCK_LEN <= x.stride, "columns are as long as the rows");
    // SAFETY: the caller has AVX2, FMA and F16C; the blocks are whole; the columns reach as far as the blocks.
    unsafe {
        // One column: both halves at once, which share the broadcasts. Several: one half, whose weights they share.
        let mut acc = [[[_mm256_setzero_ps(); 2]; N]; 1];
        let mut halves_acc = [[[_mm256_setzero_ps(); 1]; N]; 2];
        for block in w.bytes.chunks_exact(F::BLOCK_BYTES) {
            let scales = F::scales(block.as_ptr());
            if N == 1 {
                multiply_block::<F, N, 2>(block.as_ptr(), &scales, 0, &columns, &mut acc[0]);
            } else {
                multiply_block::<F, N, 1>(block.as_ptr(), &scales, 0, &columns, &mut halves_acc[0]);
                multiply_block::<F, N, 1>(block.as_ptr(), &scales, 1, &columns, &mut halves_acc[1]);
            }
            for c in 0..N {
                columns.quants[c] = columns.quants[c].add(F::BLOCK_LEN);
                columns.scales[c] = columns.scales[c].add(F::BLOCK_LEN / QUANT_BLOCK);
                columns.sums[c] = columns.sums[c].add(F::BLOCK_LEN / QUANT_BLOCK);
            }
        }
        for (c, lanes) in out.iter_mut().enumerate() {
            let (low, high) =
                if N == 1 { (acc[0][c][0], acc[0][c][1]) } else { (halves_acc[0][c][0], halves_acc[1][c][0]) };
            _mm256_storeu_ps(lanes.as_mut_ptr(), low);
            _mm256_storeu_ps(lanes[8..].as_mut_ptr(), high);
        }
    }
}

#[inline(always)]
unsafe fn multiply<F: Format>(w: &Panel, x: &QuantisedRows, out: &mut [Lanes]) {
    let mut first = 0;
    // SAFETY: passed on from the caller.
    unsafe {
        while out.len() - first >= 4 {
            multiply_panel::<F, 4>(w, x, first, &mut out[first..]);
            first += 4;
        }
        while first < out.len() {
            multiply_panel::<F, 1>(w, x, first, &mut out[first..]);
            first += 1;
        }
    }
}

/// See `scalar::matmul_int8`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_int8(w: &Panel, x: &QuantisedRows, out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the features that all of these need.
    unsafe {
        match w.dtype {
            DType::Q4_0 => multiply::<Q4_0>(w, x, out),
            DType::Q4_1 => multiply::<Q4_1>(w, x, out),
            DType::Q5_0 => multiply::<Q5_0>(w, x, out),
            DType::Q5_1 => multiply::<Q5_1>(w, x, out),
            DType::Q8_0 => multiply::<Q8_0>(w, x, out),
            DType::Q4_K => multiply::<Q4K>(w, x, out),
            DType::Q5_K => multiply::<Q5K>(w, x, out),
            DType::Q6_K => multiply::<Q6K>(w, x, out),
            DType::F32 | DType::F16 | DType::BF16 => panic!("{} has no quants", w.dtype.name()),
        }
    }
}

/// The f16 of a half's rows at `at`.
#[inline(always)]
unsafe fn halves(at: *const u8, half: usize) -> __m256 {
    // SAFETY: the caller has F16C, and 16 halves at `at`.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.add(16 * half).cast())) }
}

/// The half's part of the unit at `at`.
#[inline(always)]
unsafe fn unit(at: *const u8, g: usize, half: usize) -> __m256i {
    // SAFETY: the caller has AVX2 and a field of more than `g` units at `at`.
    unsafe { _mm256_loadu_si256(at.add(UNIT * g + UNIT / 2 * half).cast()) }
}

#[inline(always)]
unsafe fn low_nibbles(bytes: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_and_si256(bytes, _mm256_set1_epi8(15)) }
}

#[inline(always)]
unsafe fn high_nibbles(bytes: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { low_nibbles(_mm256_srli_epi16::<4>(bytes)) }
}

/// Nibbles of a block of 32: sub-block 0 has the low ones, sub-block 1 the high ones.
#[inline(always)]
unsafe fn nibbles_of_32<const SUB: usize>(qs: *const u8, g: usize, half: usize) -> __m256i {
    // SAFETY: the caller has AVX2 and the field `qs`.
    unsafe {
        let bytes = unit(qs, g, half);
        if SUB == 0 { low_nibbles(bytes) } else { high_nibbles(bytes) }
    }
}

/// Bit `bit` of each byte, as 16 or 0.
#[inline(always)]
unsafe fn fifth_bit(bytes: __m256i, bit: usize) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let count = _mm_cvtsi32_si128((bit as i32 - 4).abs());
        let shifted = if bit < 4 { _mm256_sll_epi16(bytes, count) } else { _mm256_srl_epi16(bytes, count) };
        _mm256_and_si256(shifted, _mm256_set1_epi8(16))
    }
}

/// A half of 16 bytes, each twice, as 16-bit numbers: a row's scale in both halves of its lane.
#[inline(always)]
unsafe fn twice(bytes: __m128i, half: usize) -> __m128i {
    // SAFETY: SSE2 belongs to x86-64.
    unsafe { if half == 0 { _mm_unpacklo_epi8(bytes, bytes) } else { _mm_unpackhi_epi8(bytes, bytes) } }
}

/// Defines a format with blocks of 32: no integer scales within a block, one factor for its minimums.
macro_rules! block_of_32 {
    ($name:ident, $dtype:expr, $quants_kind:expr, $has_min:literal,
     |$block:ident, $half:ident| $quants:expr, |$m_block:ident, $m_half:ident, $d:ident| $m:expr) => {
        #[allow(non_camel_case_types)]
        struct $name;

        impl Format for $name {
            const BLOCK_LEN: usize = 32;
            const BLOCK_BYTES: usize = LANES * $dtype;
            const SUBS_PER_STEP: usize = 2;
            const HAS_MIN: bool = $has_min;
            const QUANTS: Quants = $quants_kind;
            type Scales = ();

            #[inline(always)]
            unsafe fn scales(_block: *const u8) {}

            #[inline(always)]
            unsafe fn quants<const SUB: usize, const G: usize>(
                $block: *const u8,
                _step: usize,
                $half: usize,
            ) -> __m256i {
                // SAFETY: the caller has AVX2 and a panel block.
                unsafe { $quants }
            }

            #[inline(always)]
            unsafe fn scale(_scales: &(), _sub: usize, _half: usize) -> __m256i {
                // SAFETY: the caller has AVX2.
                unsafe { _mm256_set1_epi16(1) }
            }

            #[inline(always)]
            unsafe fn min(_scales: &(), _sub: usize, _half: usize) -> __m256 {
                // SAFETY: the caller has AVX2.
                unsafe { _mm256_set1_ps(1.0) }
            }

            #[inline(always)]
            unsafe fn m($m_block: *const u8, $m_half: usize, $d: __m256) -> __m256 {
                // SAFETY: the caller has AVX2 and a panel block.
                unsafe { $m }
            }
        }
    };
}

block_of_32!(
    Q4_0,
    18,
    Quants::UpTo31,
    true,
    |block, half| nibbles_of_32::<SUB>(block.add(32), G, half),
    |_block, _half, d| _mm256_mul_ps(_mm256_set1_ps(8.0), d)
);
block_of_32!(
    Q4_1,
    20,
    Quants::UpTo31,
    true,
    |block, half| nibbles_of_32::<SUB>(block.add(64), G, half),
    |block, half, _d| negated(halves(block.add(32), half))
);
block_of_32!(
    Q5_0,
    22,
    Quants::UpTo31,
    true,
    |block, half| _mm256_or_si256(
        nibbles_of_32::<SUB>(block.add(96), G, half),
        fifth_bit(unit(block.add(32), 0, half), 4 * SUB + G)
    ),
    |_block, _half, d| _mm256_mul_ps(_mm256_set1_ps(16.0), d)
);
block_of_32!(
    Q5_1,
    24,
    Quants::UpTo31,
    true,
    |block, half| _mm256_or_si256(
        nibbles_of_32::<SUB>(block.add(128), G, half),
        fifth_bit(unit(block.add(64), 0, half), 4 * SUB + G)
    ),
    |block, half, _d| negated(halves(block.add(32), half))
);
block_of_32!(
    Q8_0,
    34,
    Quants::Signed,
    false,
    |block, half| unit(block.add(32), 4 * SUB + G, half),
    |_block, _half, _d| _mm256_setzero_ps()
);

#[inline(always)]
unsafe fn negated(v: __m256) -> __m256 {
    // SAFETY: the caller has AVX.
    unsafe { _mm256_xor_ps(v, _mm256_set1_ps(-0.0)) }
}

/// Scales and minimums of Q4_K and Q5_K, for each 32 columns those of all rows.
struct SixBitScales {
    scales: [__m128i; 8],
    mins: [__m128i; 8],
}

impl SixBitScales {
    /// From the 12 bytes of each row at `at`, as `quant::blocks` describes them.
    #[inline(always)]
    unsafe fn new(at: *const u8) -> Self {
        // SAFETY: the caller has AVX2 and 12 * 16 bytes at `at`.
        unsafe {
            let (low_six, low_four, top) = (_mm_set1_epi8(63), _mm_set1_epi8(15), _mm_set1_epi8(0x30));
            let mut all = Self { scales: [_mm_setzero_si128(); 8], mins: [_mm_setzero_si128(); 8] };
            for j in 0..4 {
                let s = _mm_loadu_si128(at.add(LANES * j).cast());
                let m = _mm_loadu_si128(at.add(LANES * (4 + j)).cast());
                let both = _mm_loadu_si128(at.add(LANES * (8 + j)).cast());
                all.scales[j] = _mm_and_si128(s, low_six);
                all.mins[j] = _mm_and_si128(m, low_six);
                let (s_top, m_top) = (_mm_srli_epi16::<2>(s), _mm_srli_epi16::<2>(m));
                let high = _mm_srli_epi16::<4>(both);
                all.scales[4 + j] = _mm_or_si128(_mm_and_si128(both, low_four), _mm_and_si128(s_top, top));
                all.mins[4 + j] = _mm_or_si128(_mm_and_si128(high, low_four), _mm_and_si128(m_top, top));
            }
            all
        }
    }

    #[inline(always)]
    unsafe fn scale(&self, sub: usize, half: usize) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_cvtepu8_epi16(twice(self.scales[sub / 2], half)) }
    }

    #[inline(always)]
    unsafe fn min(&self, sub: usize, half: usize) -> __m256 {
        // SAFETY: the caller has AVX2.
        unsafe {
            let mins = self.mins[sub / 2];
            let mins = if half == 0 { mins } else { _mm_unpackhi_epi64(mins, mins) };
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(mins))
        }
    }
}

/// Nibbles of 64 columns, 8 units: sub-blocks 0 and 1 have the low ones, 2 and 3 the high ones.
#[inline(always)]
unsafe fn nibbles_of_64<const SUB: usize>(qs: *const u8, step: usize, g: usize, half: usize) -> __m256i {
    // SAFETY: the caller has AVX2 and the field `qs`.
    unsafe {
        let bytes = unit(qs, 8 * step + 4 * (SUB % 2) + g, half);
        if SUB < 2 { low_nibbles(bytes) } else { high_nibbles(bytes) }
    }
}

/// Defines what Q4_K and Q5_K have in common.
macro_rules! six_bit_format {
    ($name:ident, $block_bytes:literal, |$block:ident, $step:ident, $half:ident| $quants:expr) => {
        struct $name;

        impl Format for $name {
            const BLOCK_LEN: usize = 256;
            const BLOCK_BYTES: usize = LANES * $block_bytes;
            const SUBS_PER_STEP: usize = 4;
            const HAS_MIN: bool = true;
            const QUANTS: Quants = Quants::UpTo31;
            type Scales = SixBitScales;

            #[inline(always)]
            unsafe fn scales(block: *const u8) -> SixBitScales {
                // SAFETY: the caller has AVX2 and a panel block.
                unsafe { SixBitScales::new(block.add(64)) }
            }

            #[inline(always)]
            unsafe fn quants<const SUB: usize, const G: usize>(
                $block: *const u8,
                $step: usize,
                $half: usize,
            ) -> __m256i {
                // SAFETY: the caller has AVX2 and a panel block.
                unsafe { $quants }
            }

            #[inline(always)]
            unsafe fn scale(scales: &SixBitScales, sub: usize, half: usize) -> __m256i {
                // SAFETY: the caller has AVX2.
                unsafe { scales.scale(sub, half) }
            }

            #[inline(always)]
            unsafe fn min(scales: &SixBitScales, sub: usize, half: usize) -> __m256 {
                // SAFETY: the caller has AVX2.
                unsafe { scales.min(sub, half) }
            }

            #[inline(always)]
            unsafe fn m(block: *const u8, half: usize, _d: __m256) -> __m256 {
                // SAFETY: the caller has F16C and a panel block.
                unsafe { halves(block.add(32), half) }
            }
        }
    };
}

six_bit_format!(Q4K, 144, |block, step, half| nibbles_of_64::<SUB>(block.add(256), step, G, half));
six_bit_format!(Q5K, 176, |block, step, half| _mm256_or_si256(
    nibbles_of_64::<SUB>(block.add(768), step, G, half),
    fifth_bit(unit(block.add(256), 4 * (SUB % 2) + G, half), 2 * step + SUB / 2)
));

struct Q6K;

impl Format for Q6K {
    const BLOCK_LEN: usize = 256;
    const BLOCK_BYTES: usize = LANES * 210;
    const SUBS_PER_STEP: usize = 8;
    const HAS_MIN: bool = true;
    const QUANTS: Quants = Quants::UpTo63;
    /// The scales at the start of this field: 16 bytes for each sub-block.
    type Scales = *const u8;

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> *const u8 {
        // SAFETY: the caller has a panel block.
        unsafe { block.add(32) }
    }

    /// Per 128 columns there are two parts, each of 4 units of high bits, then twice 4 units of nibbles. Quarter q =
    /// SUB / 2 has its low bits in the low (q < 2) or high nibbles of the first (q even) or second four, its high bits
    /// at bit 2 q.
    #[inline(always)]
    unsafe fn quants<const SUB: usize, const G: usize>(block: *const u8, step: usize, half: usize) -> __m256i {
        // SAFETY: the caller has AVX2 and a panel block.
        unsafe {
            let quarter = SUB / 2;
            let part = block.add(288 + (2 * step + SUB % 2) * 12 * UNIT);
            let (low, high) = (unit(part, 4 + 4 * (quarter % 2) + G, half), unit(part, G, half));
            let low = if quarter < 2 { low_nibbles(low) } else { high_nibbles(low) };
            let high = match quarter {
                0 => _mm256_slli_epi16::<4>(high),
                1 => _mm256_slli_epi16::<2>(high),
                2 => high,
                _ => _mm256_srli_epi16::<2>(high),
            };
            _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(0x30)))
        }
    }

    #[inline(always)]
    unsafe fn scale(scales: &*const u8, sub: usize, half: usize) -> __m256i {
        // SAFETY: the caller has AVX2, and the block's scales at `scales`.
        unsafe { _mm256_cvtepi8_epi16(twice(_mm_loadu_si128(scales.add(LANES * sub).cast()), half)) }
    }

    #[inline(always)]
    unsafe fn min(scales: &*const u8, sub: usize, half: usize) -> __m256 {
        // SAFETY: the caller has AVX2, and the block's scales at `scales`.
        unsafe {
            let scales = _mm_loadl_epi64(scales.add(LANES * sub + LANES / 2 * half).cast());
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(scales))
        }
    }

    #[inline(always)]
    unsafe fn m(_block: *const u8, _half: usize, d: __m256) -> __m256 {
        // SAFETY: the caller has AVX.
        unsafe { _mm256_mul_ps(_mm256_set1_ps(32.0), d) }
    }
}
