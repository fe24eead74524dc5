//! Loops that do one thing as fast as the CPU can: what kernels are compared to.

use super::math::{LANES, Lanes};
use super::prefetch::prefetch_lines;
use std::array::from_fn;
use std::hint::black_box;

/// Bytes that the reading loops take at a time.
pub const READ_UNIT: usize = 256;
/// How far ahead of the loads memory is asked for, bytes.
const PREFETCH_DISTANCE: usize = 4096;

/// The sum of `bytes` as 64-bit words: a plain loop of loads.
#[inline(always)]
pub fn read(bytes: &[u8]) -> u64 {
    read_all(bytes, |_| ())
}

/// The same, asking for memory ahead of the loads.
#[inline(always)]
pub fn read_prefetched(bytes: &[u8]) -> u64 {
    read_all(bytes, |unit| {
        prefetch_lines(unit.as_ptr().wrapping_add(PREFETCH_DISTANCE), READ_UNIT);
    })
}

#[inline(always)]
fn read_all(bytes: &[u8], ahead: impl Fn(&[u8; READ_UNIT])) -> u64 {
    let mut sums = [0_u64; READ_UNIT / 8];
    for unit in bytes.as_chunks::<READ_UNIT>().0 {
        ahead(unit);
        // Each unit by itself: with AVX-512 the compiler would gather from several, at a tenth of the speed.
        let unit = black_box(unit);
        for (sum, word) in sums.iter_mut().zip(unit.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |total, sum| total.wrapping_add(*sum))
}

/// Runs `rounds` of fused multiply-adds on independent accumulators; returns how many multiply-adds these were.
#[inline(always)]
pub fn peak_f32(rounds: usize) -> usize {
    multiply_add::<6>(rounds)
}

/// The same where there are registers for two instructions at a time of a latency of five.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
pub fn peak_f32_avx512(rounds: usize) -> usize {
    multiply_add::<10>(rounds)
}

#[inline(always)]
fn multiply_add<const CHAINS: usize>(rounds: usize) -> usize {
    let (a, b): (Lanes, Lanes) = (black_box([0.5; LANES]), black_box([0.25; LANES]));
    let mut sums: [Lanes; CHAINS] = black_box([[1.0; LANES]; CHAINS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = from_fn(|i| sum[i].mul_add(a[i], b[i]));
        }
    }
    black_box(sums);
    rounds * CHAINS * LANES
}

/// The same with 8-bit products summed in 16 bits.
#[inline(always)]
pub fn peak_int8(rounds: usize) -> usize {
    const CHAINS: usize = 4;
    let weights = black_box([3_i8; 2 * LANES]);
    // Each product depends on the one before in its chain, so none can be left out or shared.
    let mut sums: [[i16; LANES]; CHAINS] = black_box([[1; LANES]; CHAINS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            for i in 0..LANES {
                let [low, high] = sum[i].to_le_bytes().map(|byte| i16::from(byte as i8));
                let products = i16::from(weights[2 * i]) * low + i16::from(weights[2 * i + 1]) * high;
                sum[i] = sum[i].wrapping_add(products);
            }
        }
    }
    black_box(sums);
    rounds * CHAINS * 2 * LANES
}

/// `peak_int8` by `vpmaddubsw`: 32 products an instruction.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub fn peak_int8_avx2(rounds: usize) -> usize {
    use std::arch::x86_64::{_mm256_add_epi16, _mm256_maddubs_epi16, _mm256_set1_epi8};
    const CHAINS: usize = 10;
    let weights = black_box(_mm256_set1_epi8(3));
    // Each product depends on the one before in its chain, so none can be left out or shared.
    let mut sums = black_box([_mm256_set1_epi8(5); CHAINS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_add_epi16(weights, _mm256_maddubs_epi16(weights, *sum));
        }
    }
    black_box(sums);
    rounds * CHAINS * 32
}

/// `peak_int8` by `vpdpbusd`: 64 products an instruction, summed in 32 bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
pub fn peak_int8_vnni(rounds: usize) -> usize {
    use std::arch::x86_64::{_mm512_dpbusd_epi32, _mm512_set1_epi8};
    const CHAINS: usize = 10;
    let weights = black_box(_mm512_set1_epi8(3));
    let mut sums = black_box([_mm512_set1_epi8(5); CHAINS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, weights, *sum);
        }
    }
    black_box(sums);
    rounds * CHAINS * 64
}

/// `peak_int8` by SDOT: 16 products an instruction, summed in 32 bits.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
pub fn peak_int8_dot(rounds: usize) -> usize {
    use std::arch::aarch64::{vdupq_n_s8, vdupq_n_s32};
    const CHAINS: usize = 16;
    let weights = black_box(vdupq_n_s8(3));
    let mut sums = black_box([vdupq_n_s32(5); CHAINS]);
    for _ in 0..rounds {
        for sum in &mut sums {
            // SAFETY: changes the sum alone. Each product depends on the one before in its chain.
            unsafe {
                std::arch::asm!(
                    "sdot {sum:v}.4s, {weights:v}.16b, {sum:v}.16b",
                    sum = inout(vreg) *sum, weights = in(vreg) weights,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
        }
    }
    black_box(sums);
    rounds * CHAINS * 16
}
