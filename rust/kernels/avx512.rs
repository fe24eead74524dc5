//! x86-64 with AVX-512 (F, BW, VL) and VNNI: Intel since Cascade Lake (2019), AMD since Zen 4 (2022).

#![allow(unsafe_op_in_unsafe_fn)] // every function here is unsafe for the one reason that `Simd` gives

use super::attend::{self, AttentionQueries, AttentionTile};
use super::int8::QuantisedRows;
use super::math::Lanes;
use super::packed;
use super::panel_block::Panels;
use super::plain;
use super::simd::{Quants, Simd};
use std::arch::x86_64::*;

/// See `scalar::matmul_int8`. Eight columns in one pass: their sums and minimums take half of the 32 registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub fn matmul_int8(w: &Panels, x: &QuantisedRows, out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { packed::matmul_int8::<Avx512, 1, 8, 3>(w, x, out) }
}

/// See `scalar::matmul_f32`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub fn matmul_f32(w: &Panels, x: &[f32], out: &mut [Lanes]) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { plain::matmul_f32::<Avx512, 1>(w, x, out) }
}

/// See `attend::attend`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub fn attend(tile: &AttentionTile, queries: &mut AttentionQueries) {
    // SAFETY: this function is compiled for the instruction set.
    unsafe { attend::attend_simd::<Avx512, 8>(tile, queries) }
}

struct Avx512;

/// What the instruction for products adds to signed quants, because it wants weights without a sign.
const SIGN: i8 = -128;

/// 1.5 * 2^23: integers of up to 22 bits that are added to its bits, as an integer, are added to its value.
const AS_FLOAT: f32 = 12_582_912.0;

/// Integer scales as f32, and what takes AS_FLOAT times the scale off again.
#[derive(Clone, Copy)]
pub struct Scale {
    scale: __m512,
    offset: __m512,
}

impl Scale {
    #[inline(always)]
    unsafe fn new(scale: __m512) -> Self {
        Self { scale, offset: _mm512_mul_ps(scale, _mm512_set1_ps(-AS_FLOAT)) }
    }

    /// A sum that began at AS_FLOAT, without it and times the scale: exact, because every number in it is.
    #[inline(always)]
    unsafe fn apply(self, sum: __m512i) -> __m512 {
        _mm512_fmadd_ps(_mm512_castsi512_ps(sum), self.scale, self.offset)
    }
}

impl Simd for Avx512 {
    const ROWS: usize = 16;
    const REGISTERS: usize = 32;
    type Bytes = __m512i;
    type Scale = Scale;
    type Floats = __m512;
    /// Where they lie: a broadcast is a load.
    type Sixteen = *const i8;
    type Sum = __m512i;

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m512i {
        _mm512_loadu_si512(at.cast())
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, mask: u8) -> __m512i {
        _mm512_and_si512(a, _mm512_set1_epi8(mask as i8))
    }

    #[inline(always)]
    unsafe fn insert(a: __m512i, from: __m512i, mask: u8) -> __m512i {
        _mm512_or_si512(a, Self::and(from, mask))
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
    unsafe fn unit_scale() -> Scale {
        Scale::new(_mm512_set1_ps(1.0))
    }

    #[inline(always)]
    unsafe fn unsigned_scale(panel: *const u8, row: usize) -> Scale {
        Scale::new(Self::from_unsigned(panel, row))
    }

    #[inline(always)]
    unsafe fn signed_scale(at: *const u8) -> Scale {
        Scale::new(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))))
    }

    #[inline(always)]
    fn n_sums(kind: Quants) -> usize {
        if kind == Quants::Above32 { 2 } else { 1 }
    }

    #[inline(always)]
    unsafe fn prepare(kind: Quants, w: __m512i) -> __m512i {
        if kind == Quants::Signed { _mm512_xor_si512(w, _mm512_set1_epi8(SIGN)) } else { w }
    }

    #[inline(always)]
    unsafe fn sixteen(x: *const i8) -> *const i8 {
        x
    }

    #[inline(always)]
    unsafe fn start(kind: Quants, pairs: *const [i16; 2], step: usize, n: usize) -> __m512i {
        let offset = if kind == Quants::Signed { -i16::from(SIGN) } else { kind.offset() };
        let mut sum = _mm512_set1_epi32(AS_FLOAT.to_bits() as i32);
        for i in 0..n {
            if offset != 0 {
                let pair = _mm512_set1_epi32(pairs.add(i * step).cast::<i32>().read_unaligned());
                sum = _mm512_dpwssd_epi32(sum, pair, _mm512_set1_epi16(-offset));
            }
        }
        sum
    }

    /// `vpdpbusd` adds up four products for each row, in 32 bits.
    #[inline(always)]
    unsafe fn add_products(_kind: Quants, sum: __m512i, w: __m512i, x: *const i8, four: usize) -> __m512i {
        _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x.add(4 * four).cast::<i32>().read_unaligned()))
    }

    /// The scaled sum is below 2^24, so scaling in f32 is exact as well.
    #[inline(always)]
    unsafe fn finish(kind: Quants, sums: [__m512i; 2], scales: [Scale; 2]) -> __m512 {
        let first = scales[0].apply(sums[0]);
        if Self::n_sums(kind) == 1 {
            return first;
        }
        _mm512_add_ps(scales[1].apply(sums[1]), first)
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn from_f32(at: *const u8) -> __m512 {
        _mm512_loadu_ps(at.cast())
    }

    #[inline(always)]
    unsafe fn from_bf16(at: *const u8) -> __m512 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))
    }

    #[inline(always)]
    unsafe fn from_unsigned(panel: *const u8, row: usize) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(panel.add(row).cast())))
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
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
}
