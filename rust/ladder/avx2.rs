//! The rungs' functions for x86-64 with AVX2: the portable loops compiled for it, with products by hand.

use super::dot::{Functions, Int8, Row, Sums, Vector, WIDTH, add_rest, add_up, dense_in_lanes, in_integers, in_lanes};
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
    in_lanes::<1>(row, x, out, |w, x, sums| add_scaled(w, x, sums), |w, x, sums| add_products(w, x, sums));
}

#[target_feature(enable = "avx2,fma")]
fn dense_one_sum(w: &[f32], x: &[f32]) -> f32 {
    dense_in_lanes::<1>(w, x, |w, x, sums| add_products(w, x, sums))
}

#[target_feature(enable = "avx2,fma")]
fn four_sums(row: Row, x: &[Vector], out: &mut [f32]) {
    in_lanes::<4>(row, x, out, |w, x, sums| add_scaled(w, x, sums), |w, x, sums| add_products(w, x, sums));
}

#[target_feature(enable = "avx2,fma")]
fn dense_four_sums(w: &[f32], x: &[f32]) -> f32 {
    dense_in_lanes::<4>(w, x, |w, x, sums| add_products(w, x, sums))
}

/// Each register of sums gets the products of every SUMSth register of floats.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add_products<const SUMS: usize>(w: &[f32], x: &[f32], sums: &mut Sums<SUMS>) {
    let n = w.len().min(x.len()) / (SUMS * WIDTH) * (SUMS * WIDTH);
    let mut kept = load(sums);
    for start in (0..n).step_by(SUMS * WIDTH) {
        for (i, kept) in kept.iter_mut().enumerate() {
            // SAFETY: both have n floats and more.
            let (w, x) = unsafe {
                (_mm256_loadu_ps(w.as_ptr().add(start + i * WIDTH)), _mm256_loadu_ps(x.as_ptr().add(start + i * WIDTH)))
            };
            *kept = _mm256_fmadd_ps(w, x, *kept);
        }
    }
    store(kept, sums);
    add_rest(&w[n..], &x[n..], sums);
}

/// The same with the quants of every SUMSth 16 weights, whose products are scaled together.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add_scaled<const SUMS: usize>(w: &Unpacked, x: &[f32], sums: &mut Sums<SUMS>) {
    let x = x.as_chunks::<SUM_BLOCK>().0;
    let quants = &w.quants.as_chunks::<SUM_BLOCK>().0[..x.len()];
    let mut kept = load(sums);
    let whole = x.len() / SUMS * SUMS;
    for start in (0..whole).step_by(SUMS) {
        for (i, kept) in kept.iter_mut().enumerate() {
            *kept = scaled(&quants[start + i], &x[start + i], w.scales[start + i], *kept);
        }
    }
    for part in whole..x.len() {
        kept[0] = scaled(&quants[part], &x[part], w.scales[part], kept[0]);
    }
    store(kept, sums);
}

/// Adds a scale times the products of 16 quants to a register of sums.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn scaled(quants: &[i8; SUM_BLOCK], x: &[f32; SUM_BLOCK], scale: f32, sum: __m256) -> __m256 {
    // SAFETY: both have 16 elements.
    let (quants, low, high) = unsafe {
        let x = x.as_ptr();
        (_mm_loadu_si128(quants.as_ptr().cast()), _mm256_loadu_ps(x), _mm256_loadu_ps(x.add(WIDTH)))
    };
    let first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(quants));
    let second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(quants)));
    _mm256_fmadd_ps(_mm256_set1_ps(scale), _mm256_fmadd_ps(second, high, _mm256_mul_ps(first, low)), sum)
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn load<const SUMS: usize>(sums: &Sums<SUMS>) -> [__m256; SUMS] {
    // SAFETY: eight floats each.
    std::array::from_fn(|i| unsafe { _mm256_loadu_ps(sums[i].as_ptr()) })
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn store<const SUMS: usize>(kept: [__m256; SUMS], sums: &mut Sums<SUMS>) {
    for (kept, sum) in kept.iter().zip(sums) {
        // SAFETY: eight floats.
        unsafe { _mm256_storeu_ps(sum.as_mut_ptr(), *kept) };
    }
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
    let mut lanes = [0.0; WIDTH];
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(sum, other)) };
    add_up(lanes)
}
