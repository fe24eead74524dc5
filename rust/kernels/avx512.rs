//! x86-64 with AVX-512 (F, BW, VL) and VNNI: Intel since Cascade Lake (2019), AMD since Zen 4 (2022).

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives

use super::math::Lanes;
use super::packed;
use super::scalar::{Panel, QuantisedRows};
use super::simd::{Quants, Simd};
use std::arch::x86_64::*;

/// See `scalar::matmul_int8`. Eight columns in one pass: their sums and minimums take half of the 32 registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub fn matmul_int8(w: &Panel, x: &QuantisedRows, out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { packed::matmul_int8::<Avx512, 1, 8>(w, x, out) }
}

struct Avx512;

/// `sum` plus the products of four columns: `vpdpbusd` adds them up in 32 bits.
#[inline(always)]
unsafe fn add_products(sum: __m512i, kind: Quants, w: __m512i, x: *const i8) -> __m512i {
    let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
    match kind {
        Quants::UpTo31 | Quants::UpTo63 => _mm512_dpbusd_epi32(sum, w, x),
        // |w| * (x with the sign of w); |-128| is 128 as an unsigned byte.
        Quants::Signed => {
            let signed = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
            _mm512_dpbusd_epi32(sum, _mm512_abs_epi8(w), signed)
        }
    }
}

impl Simd for Avx512 {
    const ROWS: usize = 16;
    /// On Zen 4, asking ahead cost a fifth with one thread and gained nothing with two.
    const PREFETCH_DISTANCE: usize = 0;
    type Bytes = __m512i;
    type Scale = __m512;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m512i {
        _mm512_loadu_si512(at.cast())
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, mask: u8) -> __m512i {
        _mm512_and_si512(a, _mm512_set1_epi8(mask as i8))
    }

    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }

    #[inline(always)]
    unsafe fn shift_right<const BITS: u32>(a: __m512i) -> __m512i {
        _mm512_srli_epi16::<BITS>(a)
    }

    #[inline(always)]
    unsafe fn shift_left<const BITS: u32>(a: __m512i) -> __m512i {
        _mm512_slli_epi16::<BITS>(a)
    }

    #[inline(always)]
    unsafe fn unit_scale() -> __m512 {
        _mm512_set1_ps(1.0)
    }

    #[inline(always)]
    unsafe fn unsigned_scale(at: *const u8) -> __m512 {
        Self::from_unsigned(at)
    }

    #[inline(always)]
    unsafe fn signed_scale(at: *const u8) -> __m512 {
        Self::from_signed(at)
    }

    /// The scaled sum is below 2^24, so scaling in f32 is exact as well.
    #[inline(always)]
    unsafe fn sub_block_sum(kind: Quants, w: [__m512i; 4], x: *const i8, scale: __m512) -> __m512 {
        let mut sum = _mm512_setzero_si512();
        sum = add_products(sum, kind, w[0], x);
        sum = add_products(sum, kind, w[1], x.add(4));
        sum = add_products(sum, kind, w[2], x.add(8));
        sum = add_products(sum, kind, w[3], x.add(12));
        _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale)
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))
    }

    #[inline(always)]
    unsafe fn from_unsigned(at: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())))
    }

    #[inline(always)]
    unsafe fn from_signed(at: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn negated_mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fnmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn store(a: __m512, to: *mut f32) {
        _mm512_storeu_ps(to, a)
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast())
    }
}
