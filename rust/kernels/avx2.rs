//! x86-64 with AVX2, FMA and F16C: Intel since Haswell (2013), AMD since Zen (2017).

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives

use super::attend::{self, AttentionQueries, AttentionTile};
use super::int8::QuantisedRows;
use super::math::Lanes;
use super::packed;
use super::panel_block::Panels;
use super::plain;
use super::simd::{Quants, Simd};
use std::arch::x86_64::*;

/// See `scalar::matmul_int8`. Four columns in one pass: their sums and minimums take half of the 16 registers.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_int8(w: &Panels, x: &QuantisedRows, out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { packed::matmul_int8::<Avx2, 2, 4, 2>(w, x, out) }
}

/// See `scalar::matmul_f32`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_f32(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { plain::matmul_f32::<Avx2, 2>(w, x, out) }
}

/// See `attend::attend`.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn attend(tile: &AttentionTile, queries: &mut AttentionQueries) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { attend::attend_simd::<Avx2, 4>(tile, queries) }
}

struct Avx2;

impl Simd for Avx2 {
    const ROWS: usize = 8;
    const REGISTERS: usize = 16;
    type Bytes = __m256i;
    /// In both 16-bit halves of a row's lane, so that `vpmaddwd` joins the row's two sums, scaled.
    type Scale = __m256i;
    type Floats = __m256;
    /// Where they lie: a broadcast is a load.
    type Sixteen = *const i8;
    type Sum = __m256i;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m256i {
        _mm256_loadu_si256(at.cast())
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, mask: u8) -> __m256i {
        _mm256_and_si256(a, _mm256_set1_epi8(mask as i8))
    }

    #[inline(always)]
    unsafe fn insert(a: __m256i, from: __m256i, mask: u8) -> __m256i {
        _mm256_or_si256(a, Self::and(from, mask))
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
    unsafe fn unsigned_scale(panel: *const u8, row: usize) -> __m256i {
        let bytes = _mm_loadl_epi64(panel.add(row).cast());
        _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, bytes))
    }

    #[inline(always)]
    unsafe fn signed_scale(at: *const u8) -> __m256i {
        let bytes = _mm_loadl_epi64(at.cast());
        _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes))
    }

    #[inline(always)]
    fn n_sums(kind: Quants) -> usize {
        if matches!(kind, Quants::UpTo31 | Quants::Above32) { 2 } else { 1 }
    }

    #[inline(always)]
    unsafe fn prepare(_kind: Quants, w: __m256i) -> __m256i {
        w
    }

    #[inline(always)]
    unsafe fn sixteen(x: *const i8) -> *const i8 {
        x
    }

    #[inline(always)]
    unsafe fn start(kind: Quants, pairs: *const [i16; 2], step: usize, n: usize) -> __m256i {
        let mut sum = _mm256_setzero_si256();
        for i in 0..n {
            if kind.offset() != 0 {
                let pair = _mm256_set1_epi32(pairs.add(i * step).cast::<i32>().read_unaligned());
                sum = _mm256_add_epi16(sum, pair);
            }
        }
        _mm256_mullo_epi16(sum, _mm256_set1_epi16(-kind.offset()))
    }

    /// Two 16-bit sums for each row; signed quants have one of 32 bits.
    #[inline(always)]
    unsafe fn add_products(kind: Quants, sum: __m256i, w: __m256i, x: *const i8, four: usize) -> __m256i {
        let x = _mm256_set1_epi32(x.add(4 * four).cast::<i32>().read_unaligned());
        if kind == Quants::Signed {
            // |w| * (x with the sign of w); |-128| is 128 as an unsigned byte.
            let products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))
        } else {
            _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x))
        }
    }

    #[inline(always)]
    unsafe fn finish(kind: Quants, sums: [__m256i; 2], scales: [__m256i; 2]) -> __m256 {
        if kind == Quants::Signed {
            return _mm256_cvtepi32_ps(sums[0]); // no format has signed quants and integer scales
        }
        let first = _mm256_madd_epi16(sums[0], scales[0]);
        if Self::n_sums(kind) == 1 {
            return _mm256_cvtepi32_ps(first);
        }
        _mm256_cvtepi32_ps(_mm256_add_epi32(first, _mm256_madd_epi16(sums[1], scales[1])))
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
    unsafe fn from_unsigned(panel: *const u8, row: usize) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(panel.add(row).cast())))
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
}
