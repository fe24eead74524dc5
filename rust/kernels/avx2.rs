//! x86-64 with AVX2, FMA and F16C: Intel since Haswell (2013), AMD since Zen (2017).

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives
#![allow(clippy::needless_range_loop)] // loops over units read best by index

use super::activations::QuantisedRows;
use super::attend::{self, AttentionQueries, AttentionTile};
use super::math::Lanes;
use super::packed;
use super::panel_block::Panel;
use super::simd::{Quants, Simd};
use std::arch::x86_64::*;

/// See `scalar::matmul_int8`. Four columns in one pass: their sums and minimums take half of the 16 registers.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_int8(w: &Panel, x: &QuantisedRows, out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { packed::matmul_int8::<Avx2, 2, 4>(w, x, out) }
}

/// See `scalar::matmul_f32`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_f32(w: &Panel, x: &[f32], out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { packed::matmul_f32::<Avx2, 2>(w, x, out) }
}

/// See `attend::attend`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn attend(tile: &AttentionTile, queries: &mut AttentionQueries) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { attend::attend_simd::<Avx2, 4>(tile, queries) }
}

struct Avx2;

/// The next four activations of a column, for each row.
#[inline(always)]
unsafe fn four(x: *const i8) -> __m256i {
    _mm256_set1_epi32(x.cast::<i32>().read_unaligned())
}

/// `sum` plus unsigned quants times 16 activations: two 16-bit sums for each row.
#[inline(always)]
unsafe fn add_products(mut sum: __m256i, w: &[__m256i], x: *const i8) -> __m256i {
    for g in 0..4 {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[g], four(x.add(4 * g))));
    }
    sum
}

/// Where the sums of 16 columns begin.
#[inline(always)]
unsafe fn start(kind: Quants, pairs: *const [i16; 2]) -> __m256i {
    if kind.offset() == 0 {
        return _mm256_setzero_si256();
    }
    let pair = _mm256_set1_epi32(pairs.cast::<i32>().read_unaligned());
    _mm256_mullo_epi16(pair, _mm256_set1_epi16(-kind.offset()))
}

/// Signed quants times four activations: |w| * (x with the sign of w); |-128| is 128 as an unsigned byte.
#[inline(always)]
unsafe fn signed_product(w: __m256i, x: *const i8) -> __m256i {
    let signed = _mm256_sign_epi8(four(x), w);
    _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed)
}

impl Simd for Avx2 {
    const ROWS: usize = 8;
    type Bytes = __m256i;
    /// In both 16-bit halves of a row's lane, so that `vpmaddwd` joins the row's two sums, scaled.
    type Scale = __m256i;
    type Floats = __m256;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m256i {
        _mm256_loadu_si256(at.cast())
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, mask: u8) -> __m256i {
        _mm256_and_si256(a, _mm256_set1_epi8(mask as i8))
    }

    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        _mm256_or_si256(a, b)
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(a: __m256i) -> __m256i {
        _mm256_srl_epi16(a, _mm_cvtsi32_si128(BITS as i32))
    }

    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(a: __m256i) -> __m256i {
        _mm256_sll_epi16(a, _mm_cvtsi32_si128(BITS as i32))
    }

    #[inline(always)]
    unsafe fn unit_scale() -> __m256i {
        _mm256_set1_epi16(1)
    }

    #[inline(always)]
    unsafe fn unsigned_scale(at: *const u8) -> __m256i {
        let bytes = _mm_loadl_epi64(at.cast());
        _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, bytes))
    }

    #[inline(always)]
    unsafe fn signed_scale(at: *const u8) -> __m256i {
        let bytes = _mm_loadl_epi64(at.cast());
        _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes))
    }

    #[inline(always)]
    unsafe fn sub_block_sum(
        kind: Quants,
        w: [__m256i; 8],
        x: *const i8,
        pairs: *const [i16; 2],
        scales: [__m256i; 2],
    ) -> __m256 {
        let (low, high) = (&w[..4], &w[4..]);
        let sum = match kind {
            Quants::UpTo15 | Quants::Above8 | Quants::Above16 => {
                let begin = _mm256_add_epi16(start(kind, pairs), start(kind, pairs.add(1)));
                let first = add_products(begin, low, x);
                _mm256_madd_epi16(add_products(first, high, x.add(16)), scales[0])
            }
            Quants::UpTo31 | Quants::Above32 => {
                let first = add_products(start(kind, pairs), low, x);
                let second = add_products(start(kind, pairs.add(1)), high, x.add(16));
                _mm256_add_epi32(_mm256_madd_epi16(first, scales[0]), _mm256_madd_epi16(second, scales[1]))
            }
            Quants::Signed => {
                let mut sum = _mm256_setzero_si256();
                for g in 0..8 {
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(signed_product(w[g], x.add(4 * g)), scales[0]));
                }
                sum
            }
        };
        _mm256_cvtepi32_ps(sum)
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        _mm256_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> __m256 {
        _mm256_loadu_ps(at.cast())
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> __m256 {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(at.cast()))
    }

    #[inline(always)]
    unsafe fn from_unsigned(at: *const u8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())))
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn negated_mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fnmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn store(a: __m256, to: *mut f32) {
        _mm256_storeu_ps(to, a)
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast())
    }
}
