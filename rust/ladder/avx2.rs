//! The rungs' functions for x86-64 with AVX2: portable ones compiled for it, and integer products by hand.

use super::dot::{Functions, Int8, Row, Vector, dense_in_lanes, in_integers, in_lanes};
use crate::kernels::{QUANT_BLOCK, SUM_BLOCK};
use crate::quant::blocks::Unpacked;
use std::arch::x86_64::*;

/// The functions, if this CPU can run them.
pub fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: Functions = Functions {
        // SAFETY: handed out only after asking the CPU.
        one: (|row, x, out| unsafe { one_sum(row, x, out) }, |w, x| unsafe { dense_one_sum(w, x) }),
        // SAFETY: the same.
        four: (|row, x, out| unsafe { four_sums(row, x, out) }, |w, x| unsafe { dense_four_sums(w, x) }),
        // SAFETY: the same.
        integers: |row, x, out| unsafe { integers(row, x, out) },
    };
    let has_all = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    has_all.then_some(&FUNCTIONS)
}

#[target_feature(enable = "avx2,fma")]
fn one_sum(row: Row, x: &[Vector], out: &mut [f32]) {
    in_lanes::<1, true>(row, x, out);
}

#[target_feature(enable = "avx2,fma")]
fn dense_one_sum(w: &[f32], x: &[f32]) -> f32 {
    dense_in_lanes::<1, true>(w, x)
}

#[target_feature(enable = "avx2,fma")]
fn four_sums(row: Row, x: &[Vector], out: &mut [f32]) {
    in_lanes::<4, true>(row, x, out);
}

#[target_feature(enable = "avx2,fma")]
fn dense_four_sums(w: &[f32], x: &[f32]) -> f32 {
    dense_in_lanes::<4, true>(w, x)
}

#[target_feature(enable = "avx2,fma")]
fn integers(row: Row, x: &[Vector], out: &mut [f32]) {
    in_integers(row, x, out, |w, n, x, start| products(w, n, x, start));
}

/// 32 products at a time: |w| times x with the sign of w, in pairs of 16 bits (2 * 128 * 127 = 32,512 fits), then in
/// eight sums of 32 bits, four for each half.
#[target_feature(enable = "avx2,fma")]
fn products(w: &Unpacked, n: usize, x: &Int8, start: usize) -> f32 {
    let (mut sum, mut other) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for (i, (w_part, x_part)) in w.quants[..n]
        .as_chunks::<QUANT_BLOCK>()
        .0
        .iter()
        .zip(x.quants[start..].as_chunks::<QUANT_BLOCK>().0)
        .enumerate()
    {
        // SAFETY: both are 32 bytes.
        let (w_bytes, x_bytes) =
            unsafe { (_mm256_loadu_si256(w_part.as_ptr().cast()), _mm256_loadu_si256(x_part.as_ptr().cast())) };
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w_bytes), _mm256_sign_epi8(x_bytes, w_bytes));
        let totals = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        let halves = QUANT_BLOCK / SUM_BLOCK * i;
        let scales = _mm256_set_m128(_mm_set1_ps(w.scales[halves + 1]), _mm_set1_ps(w.scales[halves]));
        let scales = _mm256_mul_ps(scales, _mm256_set1_ps(x.scales[start / QUANT_BLOCK + i]));
        (sum, other) = (other, _mm256_fmadd_ps(totals, scales, sum)); // in turns
    }
    let mut lanes = [0.0_f32; 8];
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(sum, other)) };
    lanes.iter().sum()
}
